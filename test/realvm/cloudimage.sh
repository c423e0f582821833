#!/usr/bin/env bash
# cloudimage.sh DIR makes a cloud image from Debian packages. It resembles the image
# that users download: GPT, GRUB for BIOS and for UEFI, cloud-init with NoCloud,
# netplan, AppArmor. The script needs root or user namespaces. It uses no loop
# device and no mount.
#
#   DIR/disk.qcow2   the image
#   DIR/pool/        a package repository with what provision/ installs in the image.
#                    It has nothing else, so an emulated guest reads its lists in a
#                    second.
#
# The image gets its packages from $REPOSITORY.
set -euo pipefail
umask 022
dir=$1
: "${REPOSITORY:=http://stand-in.debian.org/}" "${SUITE:=trixie}"
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C.UTF-8
disk_mib=3072
case $(dpkg --print-architecture) in
amd64) arch=amd64 efi=x86_64 boot=BOOTX64.EFI console=ttyS0 grub='grub-pc-bin grub-efi-amd64-bin' ;;
arm64) arch=arm64 efi=arm64 boot=BOOTAA64.EFI console=ttyAMA0 grub=grub-efi-arm64-bin ;; # arm64 has no BIOS
*) echo "no cloud image for $(dpkg --print-architecture)" >&2; exit 1 ;;
esac

# Packages that a cloud image of Ubuntu has, too.
packages=(
	systemd-sysv systemd-resolved dbus libpam-systemd udev linux-image-cloud-$arch initramfs-tools zstd
	$grub grub-common
	cloud-init cloud-guest-utils netplan.io apparmor openssh-server sudo
	ca-certificates curl e2fsprogs fdisk file git gnupg iproute2 iptables kmod less libnss-resolve
	netbase patch procps psmisc rsync tmux tzdata util-linux vim xz-utils bash-completion
)
# Packages that provision/10-base.sh, 20-docker.sh and 40-tools.sh add. lazygit is
# missing because Ubuntu 24.04 does not package it either, docker-buildx for its size.
pool=(
	git-lfs jq make ncurses-term openssh-client ripgrep unzip zsh
	docker.io docker-cli docker-compose gh
)

work=$(mktemp -d "${TMPDIR:-/var/tmp}/cloudimage.XXXXXX")
trap 'rm -rf "$work"' EXIT
say() { printf 'cloud image: %s (%ss)\n' "$*" "$SECONDS" >&2; }

# mmdebstrap runs this hook with the root file system as $1.
cat >"$work/customize" <<X
#!/bin/sh
set -eu
root=\$1
chroot "\$root" apt-get clean
chroot "\$root" apt-get install -q -y --download-only --no-install-recommends ${pool[*]}
mkdir "\$root/pool"
mv "\$root"/var/cache/apt/archives/*.deb "\$root/pool"

mkdir -p "\$root/boot/grub" "\$root/etc/cloud/cloud.cfg.d"
cat >"\$root/boot/grub/early.cfg" <<'G'
search --no-floppy --label --set=root cloudimg-rootfs
set prefix=(\$root)/boot/grub
configfile /boot/grub/grub.cfg
G
# On a busy host an emulated guest fails the timer check and needs longer timeouts.
# A panic ends the VM.
cat >"\$root/boot/grub/grub.cfg" <<'G'
linux /vmlinuz root=LABEL=cloudimg-rootfs ro console=$console no_timer_check panic=1 systemd.default_timeout_start_sec=600 systemd.default_device_timeout_sec=600
initrd /initrd.img
boot
G
modules='part_gpt ext2 fat search search_label configfile normal linux echo test'
[ $arch = arm64 ] || chroot "\$root" grub-mkimage -O i386-pc -c /boot/grub/early.cfg -p /boot/grub -o /boot/grub/core.img biosdisk \$modules
chroot "\$root" grub-mkimage -O $efi-efi -c /boot/grub/early.cfg -p /boot/grub -o /boot/grub/$boot all_video \$modules

cat >"\$root/etc/fstab" <<'F'
LABEL=cloudimg-rootfs / ext4 discard,errors=remount-ro 0 1
LABEL=UEFI /boot/efi vfat umask=0077 0 1
F
mkdir -p "\$root/boot/efi"
rm -f "\$root"/etc/apt/sources.list "\$root"/etc/apt/sources.list.d/*
echo 'deb [trusted=yes] $REPOSITORY pool/' >"\$root/etc/apt/sources.list"
echo 'apt: {preserve_sources_list: true}' >"\$root/etc/cloud/cloud.cfg.d/10-sources.cfg"
# An emulated guest takes seconds to compile each profile of programs that it lacks.
find "\$root/etc/apparmor.d" -maxdepth 1 -type f ! -name lsb_release -delete
# Whenever an emulated guest adds a CA, it takes almost a second for each CA.
sed -i '/ISRG_Root_X1/!s/^mozilla/!mozilla/' "\$root/etc/ca-certificates.conf"
chroot "\$root" update-ca-certificates --fresh
# systemd need not rebuild the caches at the first boot.
touch "\$root/etc/.updated" "\$root/var/.updated"
rm -f "\$root"/etc/ssh/ssh_host_* "\$root/var/lib/dbus/machine-id" "\$root/etc/hostname"
: >"\$root/etc/machine-id"
ln -sfn ../run/systemd/resolve/stub-resolv.conf "\$root/etc/resolv.conf"
X
chmod 755 "$work/customize"
chmod 711 "$work"

say "install packages"
mmdebstrap --quiet --mode=unshare --variant=apt --format=tar --skip=check/qemu \
	--include="$(IFS=,; echo "${packages[*]}")" \
	--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/man/*' \
	--dpkgopt=force-unsafe-io --aptopt='Acquire::Retries "3"' --aptopt='APT::Install-Recommends "0"' \
	--customize-hook="$work/customize" "$SUITE" "$work/root.tar" ${MIRROR:+"$MIRROR"}

say "make the package repository"
mkdir -p "$dir/pool"
tar -C "$dir/pool" --strip-components=2 -xf "$work/root.tar" ./pool
(
	cd "$dir/pool"
	for deb in *.deb; do
		# An emulated guest unpacks zstd ten times faster than xz.
		data=$(ar t "$deb" | grep ^data.tar)
		dpkg-deb --fsys-tarfile "$deb" | zstd -q -3 >"$work/data.tar.zst"
		ar d "$deb" "$data"
		ar q "$deb" "$work/data.tar.zst"
		dpkg-deb -f "$deb"
		printf 'Filename: pool/%s\nSize: %s\nSHA256: %s\n\n' "$deb" "$(stat -c %s "$deb")" "$(sha256sum <"$deb" | cut -d' ' -f1)"
	done >Packages
	printf 'Suite: stand-in\nDate: %s\nSHA256:\n %s %s Packages\n' "$(date -Ru)" "$(sha256sum <Packages | cut -d' ' -f1)" "$(stat -c %s Packages)" >Release
)

say "make the file system"
# The files' owners exist in the namespace only, so the file system is made there.
fs='set -eu
d=$(mktemp -d "${TMPDIR:-/var/tmp}/cloudimage.XXXXXX")
trap "rm -rf $d" EXIT
mkdir "$d/root"
tar -C "$d/root" --numeric-owner --xattrs --xattrs-include="*" --exclude="./dev/*" --exclude=./pool -xf -
mke2fs -q -t ext4 -L cloudimg-rootfs -d "$d/root" "$d/fs" "$1" >&2
cat "$d/fs"'
namespace=()
[ "$(id -u)" = 0 ] || namespace=(mmdebstrap --unshare-helper)
truncate -s "$disk_mib"M "$work/disk"
first=$((1 + 4 + 16)) # MiB, before the root file system
size=$((disk_mib - first - 1))
"${namespace[@]}" bash -c "$fs" fs "${size}M" <"$work/root.tar" | dd of="$work/disk" bs=1M seek="$first" conv=notrunc,sparse iflag=fullblock status=none

say "make the disk bootable"
# Ubuntu's partition numbers. The root file system is last on the disk and can grow.
sfdisk -q --wipe-partitions never "$work/disk" <<X
label: gpt
14: start=1MiB, size=4MiB, type=21686148-6449-6E6F-744E-656564454649
15: start=5MiB, size=16MiB, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B
1: start=${first}MiB, size=${size}MiB, type=0FC63DAF-8483-4772-8E79-3D69D8477DE4
X
# extract PATH copies a file from the root file system to the work directory.
extract() { debugfs -R "dump $1 $work/${1##*/}" "$work/disk?offset=$((first << 20))" >/dev/null 2>&1 && test -s "$work/${1##*/}"; }
if [ "$arch" = amd64 ]; then
	extract /boot/grub/core.img
	extract /usr/lib/grub/i386-pc/boot.img
	# grub-bios-setup would write two sector numbers: the boot sector holds that of
	# core.img, and core.img's first sector holds that of its second one. The partition
	# of core.img begins at sector 2048.
	# write_sector FILE OFFSET SECTOR
	write_sector() { printf '%b' "$(printf '\\x%02x' $(($3 & 255)) $(($3 >> 8 & 255)) 0 0 0 0 0 0)" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none; }
	write_sector "$work/boot.img" $((0x5c)) 2048
	write_sector "$work/core.img" $((0x1f4)) 2049
	dd if="$work/boot.img" of="$work/disk" bs=1 count=440 conv=notrunc status=none
	dd if="$work/core.img" of="$work/disk" bs=1M seek=1 conv=notrunc status=none
fi
extract "/boot/grub/$boot"
mformat -C -i "$work/esp" -v UEFI -T 32768 ::
mmd -i "$work/esp" ::/EFI ::/EFI/BOOT
mcopy -i "$work/esp" "$work/$boot" "::/EFI/BOOT/$boot"
dd if="$work/esp" of="$work/disk" bs=1M seek=5 conv=notrunc status=none

say "convert the disk"
qemu-img convert -O qcow2 "$work/disk" "$dir/disk.qcow2"
say "done"
