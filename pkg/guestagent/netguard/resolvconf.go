package netguard

import (
	"errors"
	"os"
	"strings"
	"syscall"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
)

const ourResolvConf = "# Written by agent-guest. Its proxy resolves names.\nnameserver 127.0.0.1\noptions edns0\n"

// pointHere makes the guest's programs use the daemon's DNS proxy. The daemon
// repeats it, because DHCP clients, cloud-init and systemd-resolved rewrite the
// file or its link. pointHere saves their version, which may be the only source
// that names the resolver.
func pointHere(g sys.Guest) error {
	path := g.Path("/etc/resolv.conf")
	info, err := os.Lstat(path)
	if err == nil && info.Mode().IsRegular() && sys.Text(path) == ourResolvConf {
		return nil
	}
	if theirs := sys.Text(path); len(parseServers(theirs, "nameserver", false)) > 0 && !strings.Contains(theirs, "agent-guest") {
		if err := sys.WriteFile(g.Path(resolvOld), []byte(theirs), 0o644); err != nil {
			return err
		}
	}
	err = sys.WriteFile(path, []byte(ourResolvConf), 0o644)
	if errors.Is(err, syscall.EBUSY) { // a mount point cannot be replaced, only written
		return os.WriteFile(path, []byte(ourResolvConf), 0o644)
	}
	return err
}
