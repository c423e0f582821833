//go:build escape

// Package escape tries to get out of a session as root in its guest.
//
// The techniques are numbered in plan. The client in attack tries each of them in a
// real VM whose own guest firewall has been removed. Everything that they could reach
// is in network namespaces of this test, and records what arrives. The guest's claims
// count for nothing, except a canary that it cannot have guessed.
//
// Each technique first runs in a VM without an egress gateway, where it must succeed
// unless the plan says why it cannot: a technique that never works shows nothing.
// With -short there is no such VM.
package escape

import (
	"fmt"
	"os"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

var theWorld *world

// verdict is the last line that is printed.
var verdict string

func TestMain(m *testing.M) {
	code := realvm.Main(m, func() (err error) {
		theWorld, err = newWorld()
		return err
	})
	if verdict != "" {
		fmt.Println(verdict)
	}
	os.Exit(code)
}
