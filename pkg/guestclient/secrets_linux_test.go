package guestclient

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// TestSecretsAreBoundedByWhatWasDelivered checks that a guest cannot return more
// secrets than were delivered to it.
func TestSecretsAreBoundedByWhatWasDelivered(t *testing.T) {
	w := newWorld(t)
	values := map[string]secret.Value{"A": secret.NewValue("first value\n"), "B": secret.NewValue("second")}
	g := Guest{SSH: w.dial(w.target), Root: w.root, Delivered: Measure(values, "the token")}
	if err := g.SetSecrets(t.Context(), values, "the token"); err != nil {
		t.Fatal(err)
	}
	ask := func() []string {
		t.Helper()
		got, err := g.Secrets(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for _, v := range got {
			all = append(all, v.Reveal())
		}
		return all
	}
	if got := ask(); strings.Join(got, "|") != "the token|first value|second" {
		t.Errorf("an honest guest has %q", got)
	}
	// An agent owns the directory of the secrets, and may add to it.
	dir := filepath.Join(w.root, secretDir, "secrets")
	for _, name := range []string{"C", "D"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(strings.Repeat("x", 10<<20)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got := ask()
	if strings.Join(got[:3], "|") != "the token|first value|second" || len(got) != 3 {
		t.Errorf("with files of the agent it has %.100q", got)
	}
	// A guest that sends far too much gets an error.
	if err := os.WriteFile(filepath.Join(w.root, "bin/head"), []byte("#!/bin/sh\nyes a-lie | dd bs=1M count=17 2>/dev/null\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if all, err := g.Secrets(t.Context()); err == nil {
		t.Errorf("17 MB of lies were taken: %d values", len(all))
	}
	g.Delivered = Delivered{}
	if all, err := g.Secrets(t.Context()); err != nil || all != nil {
		t.Errorf("where nothing was delivered: %d values, %v", len(all), err)
	}
}
