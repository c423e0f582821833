package rules

import (
	"fmt"
	"strings"
)

// LockdownScript returns a shell script that closes a guest's network before it is up,
// for an image without the guest program. If the program is installed, the script
// leaves the rules to it. The script needs only iptables, may run at any time and
// any number of times, and fails rather than leave the network open.
func LockdownScript() string {
	var b strings.Builder
	b.WriteString(lockdownHead)
	for _, f := range Compile(nil, Network{}) {
		command, test := "iptables", "true"
		if f.IPv6 {
			command, test = "ip6tables", "[ -e /proc/sys/net/ipv6 ]"
		}
		fmt.Fprintf(&b, "if %s; then\n", test)
		filter := f.Tables[0]
		for _, from := range sortedKeys(filter.Jumps) {
			fmt.Fprintf(&b, "while %s -w 10 -D %s -j %s 2>/dev/null; do :; done\n", command, from, filter.Jumps[from])
		}
		// The Docker daemon creates DOCKER-USER, and the chain may already hold
		// rules.
		delete(filter.Jumps, "DOCKER-USER")
		fmt.Fprintf(&b, "%s-restore -w 10 --noflush <<'RULES'\n%sRULES\nfi\n", command,
			filter.Restore(map[string]int{"INPUT": 0, "OUTPUT": 0, "FORWARD": 0}))
	}
	return b.String()
}

const lockdownHead = `#!/bin/sh
# Closes the network until the guest agent has loaded a policy: loopback,
# DHCP and SSH from the host pass, everything else is dropped.
set -eu
PATH=/usr/sbin:/sbin:/usr/bin:/bin
if [ -x /usr/local/bin/agent-guest ]; then
    systemctl is-active --quiet agent-guest.service && exit 0
    /usr/local/bin/agent-guest lockdown
    if [ -e /etc/systemd/system/agent-guest.service ]; then
        systemctl start --no-block agent-guest.service
    fi
    exit 0
fi
command -v iptables-restore >/dev/null && command -v ip6tables-restore >/dev/null || {
    echo "agent-sessionizer: iptables is missing; the network cannot be closed" >&2
    exit 1
}
`
