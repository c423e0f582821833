package fake

import _ "embed"

// rootVariable tells a command in the VM where its disk is.
const rootVariable = "AGENT_GUEST_ROOT"

//go:embed stub/sudo
var stubSudo string

//go:embed stub/record
var stubRecord string

// stubs returns replacements for the guest's programs that would otherwise change the
// host.
func stubs() map[string]string {
	s := map[string]string{"sudo": stubSudo}
	for _, name := range []string{
		"systemctl", "poweroff", "iptables", "iptables-save", "iptables-restore",
		"ip6tables", "ip6tables-save", "ip6tables-restore",
	} {
		s[name] = stubRecord
	}
	return s
}
