# SPDX-License-Identifier: Apache-2.0
#
# The server in a container, for `docker build .`, `podman build .` or `buildah build .`. To run it:
#   docker run --publish 50051:50051 --volume ema-data:/data IMAGE
ARG BASE=debian:12-slim

FROM ${BASE} AS build
WORKDIR /src
# First what changes rarely: a change of the sources does not download LibTorch again.
COPY deploy/common.sh deploy/setup.sh deploy/packages*.txt deploy/requirements*.txt deploy/
RUN deploy/setup.sh --server
COPY . .
RUN cmake --preset release -DEMA_BUILD_TESTS=OFF \
    && cmake --build --preset release --target ema-server emactl
# The programs, and the shared libraries that the base does not have.
RUN mkdir -p /image/usr/local/bin /image/usr/local/lib/ema /image/etc/ld.so.conf.d \
    && install --strip build/release/server/ema-server build/release/client/cli/emactl /image/usr/local/bin \
    && ldd /image/usr/local/bin/* | awk '$3 ~ /^\// { print $3 }' | sort --unique \
       | grep --invert-match --extended-regexp '/lib(c|m|dl|rt|util|pthread|gcc_s|stdc\+\+)\.so\.[0-9]+$' \
       | xargs cp --dereference --target-directory=/image/usr/local/lib/ema \
    && echo /usr/local/lib/ema >/image/etc/ld.so.conf.d/ema.conf \
    && install --directory --owner=65532 --group=65532 /image/data

FROM ${BASE} AS cpu
COPY --from=build /image/ /
# Fails here, and not at an operator's, if a library is missing.
RUN ldconfig && ema-server --help >/dev/null && emactl --help >/dev/null
USER 65532:65532
VOLUME /data
EXPOSE 50051
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/ema-server"]
CMD ["--listen", "0.0.0.0:50051", "--data-dir", "/data"]
