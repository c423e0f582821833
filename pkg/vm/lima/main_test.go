package lima

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestMain lets the test binary also act as the host agent that it starts.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "idle" { // see idle
		c := make(chan os.Signal, 1)
		signal.Notify(c, os.Interrupt)
		fmt.Println("idle")
		<-c
		os.Exit(0)
	}
	if len(os.Args) > 1 && os.Args[1] == "hostagent" {
		if err := HostAgent(context.Background(), os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(runTests(m))
}

func newDriver(t *testing.T) *Driver {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	home := testenv.ShortDir(t)
	d, err := New(Options{Home: home, Self: self, CacheDir: t.TempDir(), Log: func(level, msg string, fields map[string]any) {
		t.Log("lima", level, msg, fields)
	}})
	if err != nil {
		t.Fatal(err)
	}
	return d
}
