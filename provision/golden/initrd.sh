#!/usr/bin/env bash
# initrd.sh FILE creates an initrd with one program and the modules that mount the
# root file system and allow the host to log in. "agent-guest" is its init and loads
# them in this order. It needs no shell, and nothing is compressed.
set -euo pipefail
out=$1
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
mkdir -p "$d/dev" "$d/agent"
mknod -m 600 "$d/dev/console" c 5 1
mknod -m 666 "$d/dev/null" c 1 3
install -m 755 /usr/local/bin/agent-guest "$d/init"

# Modules for the root file system, the seed disk and the card, then those of the
# packet filter. Otherwise the guest would unpack those one by one, each in its own
# process. Modules that are built into the kernel or unknown to it are skipped.
for m in virtio_pci virtio_blk virtio_scsi sr_mod isofs virtio_net ext4 \
	nf_tables nft_compat nft_chain_nat xt_conntrack xt_tcpudp xt_mark xt_REDIRECT ipt_REJECT ip6t_REJECT; do
	modprobe --show-depends "$m" || true
done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | awk '!seen[$0]++' | while read -r file; do
	name=${file##*/}
	name=${name%%.ko*}.ko
	case $file in
	*.xz) xz -dc "$file" >"$d/agent/$name" ;;
	*.zst) zstd -qdc "$file" >"$d/agent/$name" ;;
	*.gz) gzip -dc "$file" >"$d/agent/$name" ;;
	*) cp "$file" "$d/agent/$name" ;;
	esac
	echo "$name" >>"$d/agent/modules"
done
mkdir -p "${out%/*}"
(cd "$d" && find . -mindepth 1 | LC_ALL=C sort | cpio -o -H newc -R 0:0 --quiet) >"$out.new"
chmod 644 "$out.new"
mv -f "$out.new" "$out"
