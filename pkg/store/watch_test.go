package store_test

import (
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// A watch is notified of commits of this process and of others.
func TestWatch(t *testing.T) {
	s, path := newStore(t)
	other, err := store.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	w := s.Watch()
	defer w.Close()
	for name, by := range map[string]*store.Store{"this process": s, "another process": other} {
		changed := w.Changed()
		create(t, by, "github.com/acme/"+name)
		select {
		case <-changed:
		case <-time.After(time.Minute):
			t.Errorf("commit of %s was not noticed", name)
		}
	}
}
