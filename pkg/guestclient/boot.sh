#!/bin/sh
# A clone of a golden image needs none of this: it has closed its network already,
# brings it up itself, and announces itself.
[ "${AGENT_SEED-}" != 1 ] || exit 0

# Close the network before it is up. If that fails, the guest powers off: no session
# is better than an open one.
if ! sh <<'AGENT_LOCKDOWN'
@LOCKDOWN@
AGENT_LOCKDOWN
then
  echo 'agent-sessionizer: closing the network failed, powering off' >/dev/console
  systemctl poweroff --force --no-wall
  exit 1
fi

# The host's gateway offers the MTU of its link. It may be much larger than Ethernet's,
# which doubles the speed. networkd uses it only with this setting.
for network in 10-cloud-init-eth0 10-netplan-eth0; do
  mkdir -p "/run/systemd/network/$network.network.d" &&
    printf '[DHCPv4]\nUseMTU=yes\n' >"/run/systemd/network/$network.network.d/mtu.conf"
done

# Report over the serial console that sshd accepts logins, and its host key.
# cloud-init may first create new host keys and the user, so wait for its ssh module
# of this boot.
cat >/run/agent-announce <<'EOF'
#!/bin/sh
sem=/var/lib/cloud/instance/sem/config_ssh
while :; do
  if { [ -e "$sem" ] || [ ! -d /run/cloud-init ]; } && id -u @USER@ >/dev/null 2>&1 &&
    [ -s /etc/ssh/ssh_host_ed25519_key.pub ] &&
    grep -qs ':0016 [0-9A-F]*:0000 0A' /proc/net/tcp /proc/net/tcp6; then
    # The guest must not look up its own name in the network.
    name=$(cat /proc/sys/kernel/hostname)
    grep -qs "[[:space:]]$name\$" /etc/hosts || printf '127.0.1.1 %s\n' "$name" >>/etc/hosts
    # A leading newline: kernel messages may have left the line open.
    read -r type key _ </etc/ssh/ssh_host_ed25519_key.pub
    for tty in ttyS0 ttyAMA0 hvc0; do # QEMU on x86, QEMU on ARM, vz
      [ -c "/dev/$tty" ] && printf '\n%s %s %s\n' @MARKER@ "$type" "$key" 2>/dev/null >"/dev/$tty"
    done
    exit 0
  fi
  sleep 0.1
done
EOF
# Run it with sh, because /run may be mounted noexec.
systemd-run --quiet --no-block --collect --unit=agent-announce --property=DefaultDependencies=no /bin/sh /run/agent-announce
