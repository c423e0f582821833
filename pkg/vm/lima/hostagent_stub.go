//go:build darwin && !cgo

package lima

import (
	"context"

	"github.com/lima-vm/lima/pkg/store"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

var errNoCgo = fail.New(fail.Host, "this binary was built without cgo and cannot run VMs on macOS").
	WithHint("brew install agent-sessionizer")

// HostAgent needs cgo on macOS, for Virtualization.framework. This stub lets
// everything else be checked without cgo.
func HostAgent(context.Context, []string) error { return errNoCgo }

func prepareInstance(context.Context, *store.Instance) error { return errNoCgo }
