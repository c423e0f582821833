package guest

import (
	_ "embed"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestd/rules"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

//go:embed boot.sh
var bootScript string

// BootScript is what every VM runs as root at every boot before its network is
// up (vm.Spec.Boot). It closes the network until the guest program opens what
// the policy allows, and announces sshd's host key on the
// serial console. It holds no secret.
func BootScript() string {
	return strings.NewReplacer(
		"@DOOR@", strings.TrimSpace(rules.DoorScript()),
		"@USER@", ssh.Quote(User),
		"@MARKER@", ssh.Quote(vm.ReadyMarker),
	).Replace(bootScript)
}
