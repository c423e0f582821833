# Sourced by 80-system.sh for images that we build ourselves. Disables what Debian
# starts and a session's VM does not need. Under emulation, every unit costs 50 to
# 500 ms.
# shellcheck shell=bash

say "boot: only what a session needs"
put 644 /etc/cloud/cloud.cfg.d/91-agent-debian.cfg <<'X2'
datasource_list: [NoCloud]
system_info:
  network: {renderers: [networkd]}
# The disk is one file system without partitions, so only the file system grows.
growpart: {mode: "off"}
resize_rootfs: true
# Only the modules that the VM manager's user-data uses.
cloud_init_modules: [bootcmd, write-files, resizefs, set_hostname, update_etc_hosts, ca-certs, users-groups, ssh]
cloud_config_modules: [timezone, runcmd]
cloud_final_modules: [write-files-deferred, scripts-per-boot, scripts-per-instance, scripts-user]
X2

unit systemd-networkd.service systemd-resolved.service
mask systemd-networkd-wait-online.service systemd-network-generator.service \
	networking.service ifupdown-pre.service getty@.service serial-getty@.service \
	systemd-pstore.service systemd-binfmt.service systemd-hwdb-update.service \
	systemd-journal-catalog-update.service systemd-firstboot.service systemd-sysusers.service \
	systemd-update-done.service systemd-update-utmp.service systemd-update-utmp-runlevel.service \
	systemd-ask-password-console.path systemd-ask-password-wall.path systemd-boot-update.service \
	systemd-tpm2-setup.service systemd-tpm2-setup-early.service systemd-pcrmachine.service \
	systemd-pcrphase.service systemd-pcrphase-initrd.service systemd-pcrphase-sysinit.service \
	systemd-battery-check.service systemd-machine-id-commit.service systemd-timesyncd.service \
	modprobe@.service dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount \
	sys-kernel-tracing.mount sys-fs-fuse-connections.mount proc-sys-fs-binfmt_misc.automount \
	cloud-init-hotplugd.socket cloud-init-hotplugd.service keyboard-setup.service console-setup.service

# Modules that udev would load for devices that a session never uses.
put 644 /etc/modprobe.d/90-agent.conf <<'X2'
blacklist kvm_intel
blacklist kvm_amd
blacklist psmouse
blacklist joydev
blacklist pcspkr
blacklist i2c_i801
blacklist lpc_ich
blacklist iTCO_wdt
X2
