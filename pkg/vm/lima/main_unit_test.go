//go:build !vmtest

package lima

import (
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

func runTests(m *testing.M) int { return testenv.Run(m) }
