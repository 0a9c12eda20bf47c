# The image of configs/kuberay.yaml: `docker build -t REGISTRY/lorafleet:0.1.0 -f configs/kuberay.Dockerfile .`, after
# `pip wheel --no-deps -w dist .` in the repository's root.
# Change the tag to one that Ray publishes for the CUDA of your nodes' driver; Ray's version must stay. Where
# `which lorafleet-haproxy` says another path in it than configs/kuberay.yaml does, change that.
FROM rayproject/ray:2.60.0-py312-cu128
COPY constraints.txt dist/lorafleet-*.whl /tmp/lorafleet/
RUN pip install --no-cache-dir -c /tmp/lorafleet/constraints.txt "$(ls /tmp/lorafleet/lorafleet-*.whl)[gpu]"
