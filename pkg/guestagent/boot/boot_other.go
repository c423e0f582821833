//go:build !linux

package boot

import (
	"context"
	"errors"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
)

// Seed is unsupported: only a real guest, which runs Linux, starts from a golden
// image.

func Seed(context.Context, sys.Guest, func()) error { return errors.ErrUnsupported }

func Sleep(context.Context, sys.Guest) error { return errors.ErrUnsupported }

func PrepareFork(context.Context, sys.Guest) error { return errors.ErrUnsupported }

func AwaitFork(context.Context, sys.Guest, func()) error { return errors.ErrUnsupported }

func SetHostname(sys.Guest, string) error { return errors.ErrUnsupported }

func InInitrd() bool { return false }

func Initrd() error { return errors.ErrUnsupported }
