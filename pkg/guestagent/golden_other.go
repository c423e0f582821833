//go:build !linux

package guestagent

import (
	"context"
	"errors"
)

// Seed is unsupported: only a real guest, which runs Linux, starts from a golden
// image.

func (g Guest) Seed(context.Context, func()) error { return errors.ErrUnsupported }

func (g Guest) Sleep(context.Context) error { return errors.ErrUnsupported }

func (g Guest) SetHostname(string) error { return errors.ErrUnsupported }

func isInitrd() bool { return false }

func Initrd() error { return errors.ErrUnsupported }
