//go:build !fakevm

package app

import (
	"context"
	"log/slog"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/lima"
)

// newDriver returns the driver of the shipped program.
func newDriver(p config.Paths, self string, template []byte, log *slog.Logger) (vm.Driver, error) {
	return lima.New(lima.Options{
		Home: p.LimaHome, Self: self, CacheDir: p.Cache, Template: template,
		Log: func(level, msg string, fields map[string]any) {
			log.Debug("lima", "level", level, "msg", msg, "fields", fields)
		},
	})
}

// FakeMain reports that this build has no fake VMs; in the test build it implements the
// hidden command fake-vm.
func FakeMain(context.Context, []string) error {
	return fail.New(fail.Usage, "this build has no fake VMs")
}
