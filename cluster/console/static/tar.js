// An uncompressed tar (ustar) of a few files, as a Blob that refers to them: a browser reads gigabytes as it sends them.

const BLOCK = 512;
const MAX_BYTES = 8 ** 11 - 1; // the largest number of eleven octal digits

/** Returns the tar of `files`, which maps the name in the tar to a File or Blob. */
export function tarOf(files) {
  const parts = [];
  for (const [name, file] of Object.entries(files)) {
    parts.push(header(name, file.size), file, new Uint8Array(-file.size & (BLOCK - 1)));
  }
  parts.push(new Uint8Array(2 * BLOCK));
  return new Blob(parts);
}

function header(name, size) {
  if (size > MAX_BYTES) throw new RangeError(`${name} has ${size} bytes; push files over 8 GiB from a URI.`);
  const block = new Uint8Array(BLOCK);
  const put = (offset, text) => block.set(new TextEncoder().encode(text), offset);
  const octal = (value, digits) => `${value.toString(8).padStart(digits, "0")}\0`;
  put(0, name);
  put(100, octal(0o644, 7));
  put(108, octal(0, 7));
  put(116, octal(0, 7));
  put(124, octal(size, 11));
  put(136, octal(0, 11));
  put(148, " ".repeat(8));
  put(156, "0");
  put(257, "ustar\x0000");
  const sum = block.reduce((total, byte) => total + byte, 0);
  put(148, `${octal(sum, 6)} `);
  return block;
}
