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
	const want = "the token|first value|second"
	if got := strings.Join(ask(), "|"); got != want {
		t.Errorf("secrets of an honest guest = %q, want %q", got, want)
	}
	// An agent owns the directory of the secrets, and may add to it.
	dir := filepath.Join(w.root, secretDir, "secrets")
	for _, name := range []string{"C", "D"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(strings.Repeat("x", 10<<20)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got := ask()
	if len(got) != 3 || strings.Join(got, "|") != want {
		t.Errorf("secrets of a guest with files of the agent = %.100q, want %q", got, want)
	}
	// A guest that sends far too much gets an error.
	if err := os.WriteFile(filepath.Join(w.root, "bin/head"), []byte("#!/bin/sh\nyes a-lie | dd bs=1M count=17 2>/dev/null\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if all, err := g.Secrets(t.Context()); err == nil {
		t.Errorf("Secrets() of a guest that sends 17 MB = %d values, want an error", len(all))
	}
	g.Delivered = Delivered{}
	if all, err := g.Secrets(t.Context()); err != nil || all != nil {
		t.Errorf("Secrets() after nothing was delivered = %d values, %v, want nil", len(all), err)
	}
}
