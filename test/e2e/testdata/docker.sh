#!/bin/sh
# Builds an image with network, out of busybox and the guest's own curl:
# sh docker.sh ALLOWED-URL DENIED-URL...
set -eu
allowed=$1
shift
cd "$(mktemp -d)"
mkdir -p root/bin root/tmp
cp "$(command -v busybox)" root/bin/busybox
for name in sh cat; do ln -s busybox root/bin/$name; done
curl=$(command -v curl)
cp --parents -L "$curl" $(ldd "$curl" | grep -o '/[^ ]*') /etc/ssl/certs/ca-certificates.crt root/
tar -C root -c . | docker import - local/base
cat >Dockerfile <<X
FROM local/base
RUN curl -fsS -m 60 -o /fetched $allowed
RUN for url in $*; do if curl -sS -m 20 \$url; then echo "reached \$url"; exit 1; fi; done
X
docker build --no-cache -t fetched .
echo "built: $(docker run --rm fetched cat /fetched)"
echo "host network: $(docker run --rm --network host local/base curl -fsS -m 60 "$allowed")"
for url; do
	if docker run --rm --network host local/base curl -sS -m 20 "$url"; then
		echo "reached $url"
		exit 1
	fi
done
