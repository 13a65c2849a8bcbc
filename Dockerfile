# Flatshard with torch 2.11 and CUDA 13, for every GPU that its wheels support. No base
# image with CUDA is needed: nvcc, the runtime and NCCL come with pip's packages.
#   docker build -t flatshard .                            (--build-arg GPUS="80;90a")
#   docker run --gpus all --ipc=host -v "$PWD:/work" flatshard flatshard train run.toml
FROM debian:12-slim AS build
# Debian's security updates, not versions that it removes.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates git make && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
ARG GPUS=all
RUN FLATSHARD_CUDA=on FLATSHARD_GPUS="$GPUS" make wheel

FROM debian:12-slim
# The C compiler is torch.compile's.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev \
        python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/* && \
    python3 -m venv /opt/flatshard
ENV PATH=/opt/flatshard/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build /src/dist /tmp/dist
RUN pip install --no-cache-dir /tmp/dist/*.whl numpy==2.2.6 tokenizers==0.22.1 && \
    rm -r /tmp/dist
WORKDIR /work
CMD ["flatshard", "--help"]
