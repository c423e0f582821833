package bootclock

import "testing"

func TestClock(t *testing.T) {
	before := Now()
	if after := Now(); before <= 0 || after < before {
		t.Errorf("two readings = %v, %v, want them positive and in order", before, after)
	}
	one, err := ID()
	two, err2 := ID()
	if err != nil || err2 != nil || one == "" || one != two {
		t.Errorf("ID = %q, %v, then %q, %v, want the same", one, err, two, err2)
	}
}
