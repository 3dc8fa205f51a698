# SPDX-License-Identifier: Apache-2.0
#
# The server in a container, for `docker build .`, `podman build .` or `buildah build .`. BASE is an image of
# Debian 12 or a compatible one. Targets:
#   cpu    the server for the CPU; the default
#   cuda   the server for GPUs
#   demo   the demo's trainer and evaluator
#   wheel  the Python client, for `docker build --target wheel --output build/dist .`
#
#   docker run --read-only --publish 50051:50051 --volume ema-data:/data IMAGE
#
# The server starts only with tokens (--auth-tokens), client certificates (--tls-client-ca), or
# --allow-unauthenticated. With TLS, also let it listen on unix:/tmp/ema.sock, and set EMA_SERVER to this
# address, because the health check connects to EMA_SERVER.
ARG BASE=debian:12-slim

FROM ${BASE} AS tools
WORKDIR /src
# A mounted cache can contain objects that were compiled in another checkout.
ENV CCACHE_BASEDIR=/src CCACHE_NOHASHDIR=true
# These files change rarely, so a change of the sources does not download LibTorch again.
COPY deploy/common.sh deploy/setup.sh deploy/packages*.txt deploy/requirements*.txt deploy/
RUN deploy/setup.sh --server

FROM tools AS build-cpu
COPY . .
RUN cmake --preset release -DEMA_BUILD_TESTS=OFF -DEMA_WITH_CUDA=OFF \
    && cmake --build --preset release --target ema-server emactl \
    && cmake --install build/release --component server --strip --prefix /image/usr/local

FROM tools AS build-cuda
RUN deploy/setup.sh --cuda
COPY . .
RUN cmake --preset release -DEMA_BUILD_TESTS=OFF -DEMA_WITH_CUDA=ON \
      -DCMAKE_CUDA_COMPILER="$(ls "$PWD"/build/venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)" \
    && cmake --build --preset release --target ema-server emactl \
    && cmake --install build/release --component server --strip --prefix /image/usr/local

FROM ${BASE} AS build-wheel
WORKDIR /src
COPY deploy/common.sh deploy/setup.sh deploy/packages*.txt deploy/requirements*.txt deploy/
RUN deploy/setup.sh --client
COPY . .
RUN deploy/wheel.sh

FROM scratch AS wheel
COPY --from=build-wheel /src/build/wheel/ /

FROM build-wheel AS demo
RUN deploy/setup.sh \
    && install --directory --owner=65532 --group=65532 /out /out/trainer_log /out/pulled
# torch asks for the user's name; 65532 has none.
ENV PATH=/src/build/venv/bin:$PATH OMP_NUM_THREADS=1 HOME=/tmp USER=ema
USER 65532:65532
VOLUME /out

FROM ${BASE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="EMA Server" \
      org.opencontainers.image.description="Keeps averages of a model's weights outside the training job" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN install --directory --owner=65532 --group=65532 /data /run/ema
ENV EMA_LISTEN=0.0.0.0:50051 EMA_HTTP_LISTEN=0.0.0.0:8080 EMA_DATA_DIR=/data
USER 65532:65532
VOLUME /data
EXPOSE 50051 8080
STOPSIGNAL SIGTERM
# The start period is long because the server loads its checkpoints before it serves.
HEALTHCHECK --interval=10s --timeout=6s --start-period=10m CMD ["/usr/local/bin/emactl", "health"]
ENTRYPOINT ["/usr/local/bin/ema-server"]

FROM runtime AS cuda
# The container runtime provides the driver, and nothing for graphics.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /image/ /
# If a library is missing to which they are linked, the build of the image fails.
RUN ["/usr/local/bin/ema-server", "--version"]
RUN ["/usr/local/bin/emactl", "--help"]

FROM runtime AS cpu
COPY --from=build-cpu /image/ /
RUN ["/usr/local/bin/ema-server", "--version"]
RUN ["/usr/local/bin/emactl", "--help"]
