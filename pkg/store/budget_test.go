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
		t.Errorf("%d bytes are stored, of at most %d", stored, MaxGuestEvents)
	}
	if b.Bytes > MaxGuestEvents || b.Dropped == 0 {
		t.Errorf("%+v", b)
	}
	// Small events do not pass either, so readers see where the events end.
	was := b
	if got := b.Admit(NewEvent("tool", "")); len(got) != 0 || b.Dropped != was.Dropped+1 || b.Bytes != was.Bytes {
		t.Errorf("%v, %+v, was %+v", got, b, was)
	}
	// Events without data take space, too.
	var tiny Budget
	for range 100 {
		tiny.Admit(Event{Kind: "tool"})
	}
	if tiny.Bytes < 100*eventOverhead {
		t.Errorf("100 events count as %d bytes", tiny.Bytes)
	}
	// The first dropped event leaves a warning, also within a batch.
	edge := Budget{Bytes: MaxGuestEvents - int64(len(large.Data)) - 100}
	got := edge.Admit(large, large, large)
	if len(got) != 2 || got[0].Kind != "tool" || got[1].Kind != "warning" || edge.Dropped != 2 {
		t.Errorf("%d events, %+v", len(got), edge)
	}
}

func TestEventsAreNotEscapedForHTML(t *testing.T) {
	if got := string(NewEvent("tool", map[string]string{"text": "a<b>&c\u2028"}).Data); got != `{"text":"a<b>&c\u2028"}` {
		t.Error(got)
	}
}
