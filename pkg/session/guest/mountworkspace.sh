# Mounts the disk with the file system UUID at /work. It makes the file system on an empty disk of SIZE
# bytes if FORMATTED is false. Nothing on it gives rights: a hostile session may have written it.
# Usage: UUID SIZE FORMATTED USER
set -eu
id=$1 size=$2 formatted=$3 user=$4
if ! mountpoint -q /work; then
	disk=$(blkid --match-token "UUID=$id" --output device | head -n 1)
	if [ -z "$disk" ]; then
		if [ "$formatted" = true ]; then
			echo "no disk has the file system $id" >&2
			exit 1
		fi
		for name in $(lsblk --nodeps --bytes --noheadings --output NAME,SIZE | awk -v "size=$size" '$2 == size { print $1 }'); do
			if ! blkid --probe "/dev/$name" >/dev/null; then # otherwise it has content
				disk=/dev/$name
			fi
		done
		if [ -z "$disk" ]; then
			echo "no empty disk has $size bytes" >&2
			exit 1
		fi
		mkfs.ext4 -q -m 0 -L work -U "$id" "$disk"
	fi
	repair() { e2fsck "$1" "$disk" >&2 || [ $? -le 2 ]; } # it has corrected all errors
	if ! repair -p; then
		if [ "$formatted" = true ]; then
			repair -y
		else # mkfs was interrupted
			mkfs.ext4 -q -F -m 0 -L work -U "$id" "$disk"
		fi
	fi
	mkdir -p /work
	mount -t ext4 -o nosuid,nodev,noatime "$disk" /work
fi
resize2fs "$(findmnt --noheadings --output SOURCE /work)" >/dev/null
chown "$user": /work
