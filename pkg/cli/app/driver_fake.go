//go:build fakevm

package app

import (
	"context"
	"log/slog"
	"os"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/fake"
)

// newDriver returns the driver of the test build, whose VMs are directories and run
// commands on this host. The shipped program is built without this tag.
func newDriver(p config.Paths, self string, _ []byte, _ *slog.Logger) (vm.Driver, error) {
	return fake.New(fake.Options{Dir: p.LimaHome, Self: self, Faults: os.Getenv("AGENT_SESSIONIZER_FAULTS")})
}

// FakeMain runs a fake VM.
func FakeMain(ctx context.Context, args []string) error { return fake.Main(ctx, args) }
