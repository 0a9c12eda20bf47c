# lorafleet on CPUs, to try it out or to test against. In the repository's root:
#   make dist && docker build -t lorafleet:cpu -f configs/docker/cpu.Dockerfile --build-arg TORCH_INDEX=URL .
#   docker run --rm -p 127.0.0.1:8000:8000 --shm-size 2g lorafleet:cpu
# TORCH_INDEX is the package index of torch's CPU builds, which pytorch.org names. Without it the image holds CUDA, too.
# Other commands follow the image: docker run … lorafleet:cpu serve --model /models/NAME --host 0.0.0.0 --api-keys …
FROM python:3.12-slim
COPY constraints.txt dist/lorafleet-*.whl /tmp/lorafleet/
ARG TORCH_INDEX
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    -c /tmp/lorafleet/constraints.txt /tmp/lorafleet/lorafleet-*.whl
RUN useradd --create-home lorafleet
USER lorafleet
WORKDIR /home/lorafleet
EXPOSE 8000
ENTRYPOINT ["lorafleet"]
CMD ["demo", "--host", "0.0.0.0"]
