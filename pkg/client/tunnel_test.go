package client

import (
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// A login is used again only while its certificate is valid, even if the clocks of the hosts differ.
func TestLoginsExpire(t *testing.T) {
	var l logins
	for id, expires := range map[string]time.Time{"valid": time.Now().Add(2 * maxSkew), "late": time.Now().Add(maxSkew / 2), "none": {}} {
		l.add(id, login{GuestLogin: session.GuestLogin{Expires: expires}})
	}
	for id, want := range map[string]bool{"valid": true, "late": false, "none": false, "unknown": false} {
		if _, ok := l.valid(id); ok != want {
			t.Errorf("valid(%q) = %t, want %t", id, ok, want)
		}
	}
	if len(l.of) != 1 {
		t.Errorf("%d logins are kept, want the valid one", len(l.of))
	}
	l.forget("valid")
	if _, ok := l.valid("valid"); ok {
		t.Error("a login that was forgotten is used again")
	}
}
