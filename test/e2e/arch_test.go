//go:build e2e && !foreign

package e2e

import "github.com/agent-sessionizer/agent-sessionizer/pkg/vm"

// guestArch is the architecture of the guests.
var guestArch = vm.HostArch()
