//go:build !linux

package secrets

import "errors"

func inMemory(string) error { return errors.ErrUnsupported }
