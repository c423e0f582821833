package cluster_test

import (
	"os"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
