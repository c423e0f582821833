package guestclient

import (
	_ "embed"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/rules"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

//go:embed boot.sh
var bootScript string

//go:embed sleep.sh
var sleepScript string

// BootScript returns the script that every VM runs as root at every boot before its
// network is up (vm.Spec.Boot). The script closes the network until the guest program
// opens what the policy allows, and announces sshd's host key on the serial console. It
// contains no secret.
func BootScript() string {
	return strings.NewReplacer(
		"@LOCKDOWN@", strings.TrimSpace(rules.LockdownScript()),
		"@USER@", ssh.Quote(User),
		"@MARKER@", ssh.Quote(vm.ReadyMarker),
	).Replace(bootScript)
}

// SleepScript returns the boot script of a clone of a golden image that is to be saved
// (vm.Saver.Save). The script prints guestproto.AsleepMarker and waits for a
// guestproto.Identity on its virtio console, with its network down.
func SleepScript() string { return sleepScript }
