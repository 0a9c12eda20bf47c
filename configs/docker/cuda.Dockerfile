# lorafleet on one machine's NVIDIA GPUs. In the repository's root:
#   make dist && docker build -t lorafleet:cuda -f configs/docker/cuda.Dockerfile .
#   docker run --rm --gpus all -p 8000:8000 --shm-size 8g -v /models:/models:ro -v "$PWD/keys.yaml:/keys.yaml:ro" \
#     -v lorafleet:/home/lorafleet lorafleet:cuda serve --model /models/NAME --host 0.0.0.0 --api-keys /keys.yaml
# The volume keeps the catalogue, the adapters' disk cache and compiled kernels. The devel image has the compilers that
# Triton and FlashInfer need at the first start. Its CUDA must suit your driver and the torch of constraints.txt.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
RUN apt-get update && apt-get install --yes --no-install-recommends gcc python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt dist/lorafleet-*.whl /tmp/lorafleet/
RUN python3.12 -m venv /opt/lorafleet && /opt/lorafleet/bin/pip install --no-cache-dir \
    -c /tmp/lorafleet/constraints.txt "$(ls /tmp/lorafleet/lorafleet-*.whl)[gpu]"
ENV PATH=/opt/lorafleet/bin:$PATH
RUN useradd --create-home lorafleet
USER lorafleet
WORKDIR /home/lorafleet
EXPOSE 8000
ENTRYPOINT ["lorafleet"]
CMD ["demo", "--host", "0.0.0.0"]
