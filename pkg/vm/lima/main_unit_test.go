//go:build !vmtest

package lima

import "testing"

func runTests(m *testing.M) int { return m.Run() }
