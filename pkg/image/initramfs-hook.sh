#!/bin/sh
# initramfs-tools hook: with MODULES=list, the modules a session's VM boots from.
[ "${1-}" != prereqs ] || exit 0
. /usr/share/initramfs-tools/hook-functions
manual_add_modules virtio_pci virtio_blk virtio_scsi sr_mod isofs ext4 crc32c_intel crc32c_generic
