package store_test

import (
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// A watch is notified of commits of this process and of others.
func TestWatch(t *testing.T) {
	s, path := withSession(t)
	other := reopen(t, path)
	w := s.Watch()
	defer w.Close()
	for name, by := range map[string]*store.Store{"this process": s, "another process": other} {
		changed := w.Changed()
		if err := by.Append(t.Context(), "one", event("made", 1)); err != nil {
			t.Fatal(err)
		}
		select {
		case <-changed:
		case <-time.After(time.Minute):
			t.Errorf("commit of %s was not noticed", name)
		}
	}
}
