#!/bin/sh
# Makes the disk of an image: disk.sh DIRECTORY BYTES MKFS. mmdebstrap has filled the
# directory. It belongs to us, and only we can write to it. Afterwards its content is
# in DIRECTORY/fs and the disk is DIRECTORY/disk.raw.
set -eu
cd "$1"
umask 022
chmod 755 . # the host reads the disk in it
mkdir fs
find . -mindepth 1 -maxdepth 1 ! -name fs -exec mv -t fs -- {} +
set -C # a file that exists, or a link of that name, is an error
: >disk.raw
truncate -s "$2" disk.raw
# Initialise everything now, so that the guest need not do it in its first minutes.
exec "$3" -q -F -L cloudimg-rootfs -m 1 -E lazy_itable_init=0,lazy_journal_init=0,discard -d fs disk.raw
