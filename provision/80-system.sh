#!/usr/bin/env bash
# System settings: sshd, cloud-init and journald, and no periodic jobs.
. "$PROVISION_DIR/lib.sh"

say "sshd: keys only"
put 644 /etc/ssh/sshd_config.d/00-agent.conf <<'X2'
# One host logs in as one user with one key. Everything else is disabled.
HostKey /etc/ssh/ssh_host_ed25519_key
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin no
PermitUserEnvironment no
AllowAgentForwarding no
X11Forwarding no
UseDNS no
PrintMotd no
PrintLastLog no
# All commands of a session share one connection. After a reconnect, they replace the
# sockets of the broken connection.
MaxSessions 64
MaxStartups 64:30:128
StreamLocalBindUnlink yes
X2
# AcceptEnv accumulates over all files, so "none" would not override the packaged one.
sed -i 's/^[[:space:]]*AcceptEnv/#&/' /etc/ssh/sshd_config /etc/ssh/sshd_config.d/*.conf
# All connections come from the gateway's address, so a penalty for one would block
# all. Older versions of sshd have neither the keyword nor penalties.
if [[ $(sshd -V 2>&1) =~ OpenSSH_(9\.[89]|[1-9][0-9]) ]]; then
	echo 'PerSourcePenalties no' >>/etc/ssh/sshd_config.d/00-agent.conf
fi
install -d -m 755 /run/sshd
quiet ssh-keygen -A
quiet sshd -t
# Every command of the host is a login. The message of the day and a logind session
# (which starts a user manager) each take longer than the login itself.
sed -i 's/^session.*pam_\(motd\|mail\)\.so/#&/' /etc/pam.d/sshd
sed -i 's/^session.*pam_systemd\.so/#&/' /etc/pam.d/common-session
if [ "$IN_CHROOT" != 1 ]; then quiet systemctl try-reload-or-restart ssh.service || true; fi

say "cloud-init: keep host keys across restarts"
put 644 /etc/cloud/cloud.cfg.d/90-agent.cfg <<'X2'
# The VM manager gives every boot a new instance-id, but the machine stays the same.
ssh_deletekeys: false
ssh_genkeytypes: [ed25519]
ssh: {emit_keys_to_console: false}
no_ssh_fingerprints: true
ssh_quiet_keygen: true
package_update: false
package_upgrade: false
apt: {preserve_sources_list: true}
X2

say "journald, timers"
put 644 /etc/systemd/journald.conf.d/90-agent.conf <<'X2'
[Journal]
Storage=volatile
RuntimeMaxUse=32M
X2
put 644 /etc/systemd/system.conf.d/90-agent.conf <<'X2'
[Manager]
DefaultTimeoutStopSec=10s
X2
# The allowlist can change while the machine runs, and a cached "no such name" would
# outlive the change. A session has no names of the local network.
put 644 /etc/systemd/resolved.conf.d/90-agent.conf <<'X2'
[Resolve]
Cache=no-negative
LLMNR=no
MulticastDNS=no
X2
put 644 /etc/apt/apt.conf.d/99agent <<'X2'
APT::Periodic::Enable "0";
APT::Install-Recommends "0";
APT::Install-Suggests "0";
Acquire::Retries "3";
X2
mask apt-daily.timer apt-daily-upgrade.timer apt-daily.service apt-daily-upgrade.service \
	unattended-upgrades.service dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \
	man-db.timer motd-news.timer logrotate.timer update-notifier-download.timer \
	update-notifier-motd.timer ua-timer.timer esm-cache.service ubuntu-advantage.service \
	apport.service apport-autoreport.path snapd.service snapd.socket snapd.seeded.service \
	snapd.apparmor.service ModemManager.service udisks2.service packagekit.service \
	multipathd.service multipathd.socket fwupd.service fwupd-refresh.timer pollinate.service \
	lxd-agent.service lxd-installer.socket open-iscsi.service iscsid.socket

if [ "$AGENT_SOURCE" = debian ]; then
	. "$PROVISION_DIR/files/debian-boot.sh"
fi
