package hostnet

import (
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m, nil) }
