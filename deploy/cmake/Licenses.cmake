# SPDX-License-Identifier: Apache-2.0
# ema_install_licenses(component folder DEBIAN package... PIP path...): installs the texts that the
# licenses of what we link ask for, into a folder for each package. A pip package is said by the path of
# what it installs. Where Debian's are missing, its libraries are, too.
function(ema_install_licenses component folder)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "DEBIAN;PIP")
  foreach(package IN LISTS arg_DEBIAN)
    install(FILES /usr/share/doc/${package}/copyright DESTINATION ${folder}/${package}
            COMPONENT ${component} OPTIONAL)
  endforeach()
  foreach(path IN LISTS arg_PIP)
    get_filename_component(package ${path} NAME)
    file(GLOB texts ${path}-*.dist-info/licenses/*)
    install(FILES ${texts} DESTINATION ${folder}/${package} COMPONENT ${component})
  endforeach()
endfunction()

set(ema_client_packages
  libabsl-dev libc-ares-dev libgrpc-dev libhwy-dev libisal-dev libprotobuf-dev libre2-dev libssl-dev
  zlib1g-dev)
set(ema_server_packages
  ${ema_client_packages} libcli11-dev libcurl3-gnutls libfmt-dev libmicrohttpd-dev libspdlog-dev libtomlplusplus-dev
  nlohmann-json3-dev prometheus-cpp-dev
  # What libmicrohttpd and libcurl are linked to.
  libffi8 libgmp10 libgnutls30 libhogweed6 libidn2-0 libnettle8 libp11-kit0 libtasn1-6 libunistring2
  # What only libcurl is linked to.
  libbrotli1 libcom-err2 libgssapi-krb5-2 libk5crypto3 libkeyutils1 libkrb5-3 libkrb5support0 libldap-2.5-0
  libnghttp2-14 libpsl5 librtmp1 libsasl2-2 libssh2-1 libssl3 libzstd1)
