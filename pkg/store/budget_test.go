package store

import (
	"strings"
	"testing"
)

func TestBudget(t *testing.T) {
	var b Budget
	large := NewEvent("tool", map[string]string{"text": strings.Repeat("x", 32<<10)})
	stored := int64(0)
	for range 3 * MaxGuestEvents / (32 << 10) {
		for _, ev := range b.Admit(large) {
			stored += int64(len(ev.Data))
		}
	}
	if stored > MaxGuestEvents+1024 || stored < MaxGuestEvents/2 {
		t.Errorf("stored bytes = %d, want %d to %d", stored, MaxGuestEvents/2, MaxGuestEvents+1024)
	}
	if b.Bytes > MaxGuestEvents || b.Dropped == 0 {
		t.Errorf("budget after too many events = %+v, want at most %d bytes and dropped events", b, MaxGuestEvents)
	}
	// Small events do not pass either, so readers see where the events end.
	was := b
	if got := b.Admit(NewEvent("tool", "")); len(got) != 0 || b.Dropped != was.Dropped+1 || b.Bytes != was.Bytes {
		t.Errorf("Admit over the limit = %v, budget %+v, want no events, one more dropped than %+v", got, b, was)
	}
	// Events without data take space, too.
	var tiny Budget
	for range 100 {
		tiny.Admit(Event{Kind: "tool"})
	}
	if tiny.Bytes < 100*eventOverhead {
		t.Errorf("bytes counted for 100 events = %d, want at least %d", tiny.Bytes, 100*eventOverhead)
	}
	// The first dropped event leaves a warning, also within a batch.
	edge := Budget{Bytes: MaxGuestEvents - int64(len(large.Data)) - 100}
	got := edge.Admit(large, large, large)
	if len(got) != 2 || got[0].Kind != "tool" || got[1].Kind != "warning" || edge.Dropped != 2 {
		t.Errorf("Admit at the limit = %d events, budget %+v, want a tool event and a warning, 2 dropped", len(got), edge)
	}
}

func TestEventsAreNotEscapedForHTML(t *testing.T) {
	if got := string(NewEvent("tool", map[string]string{"text": "a<b>&c\u2028"}).Data); got != `{"text":"a<b>&c\u2028"}` {
		t.Errorf("NewEvent data = %s, want <, > and & unescaped", got)
	}
}
