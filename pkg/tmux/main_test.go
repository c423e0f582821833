package tmux_test

import (
	"os"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/reexec"
)

func TestMain(m *testing.M) { os.Exit(reexec.Run(m)) }
