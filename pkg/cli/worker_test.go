package cli

import (
	"context"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// TestGuestCannotFloodNotifications checks that an agent that changes all the time causes a
// bounded number of notifications.
func TestGuestCannotFloodNotifications(t *testing.T) {
	n := 0
	notify := seldom(func(context.Context, session.Session) { n++ })
	for range 10 * noticesAtOnce {
		notify(t.Context(), session.Session{})
	}
	if n < noticesAtOnce || n > noticesAtOnce+1 { // one more if the loop takes ten seconds
		t.Errorf("notifications = %d, want %d", n, noticesAtOnce)
	}
}
