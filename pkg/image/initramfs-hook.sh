#!/bin/sh
# initramfs-tools hook: adds the modules from which a session's VM boots (MODULES=list).
[ "${1-}" != prereqs ] || exit 0
. /usr/share/initramfs-tools/hook-functions
manual_add_modules virtio_pci virtio_blk virtio_scsi sr_mod isofs ext4 crc32c_intel crc32c_generic
