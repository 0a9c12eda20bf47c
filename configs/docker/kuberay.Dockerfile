# The image of configs/kubernetes/base/ray-service.yaml. In the repository's root:
#   make dist && docker build -t REGISTRY/lorafleet:0.1.0 -f configs/docker/kuberay.Dockerfile .
# Change the tag to one that Ray publishes for the CUDA of your nodes' driver; Ray's version must stay. Where
# `which lorafleet-haproxy` says another path in it than configs/kubernetes/base/ray-service.yaml does, change that.
FROM rayproject/ray:2.60.0-py312-cu128
COPY constraints.txt dist/lorafleet-*.whl /tmp/lorafleet/
RUN pip install --no-cache-dir -c /tmp/lorafleet/constraints.txt "$(ls /tmp/lorafleet/lorafleet-*.whl)[gpu]"
