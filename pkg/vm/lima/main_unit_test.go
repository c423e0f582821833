//go:build !vmtest

package lima

import (
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/reexec"
)

func runTests(m *testing.M) int { return reexec.Run(m) }
