package app

import (
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
)

// TestLeastLoaded chooses hosts for a new session.
func TestLeastLoaded(t *testing.T) {
	host := func(name string, state fleet.HostState, memory int64, images ...string) fleet.HostView {
		return fleet.HostView{Name: name, State: state, FreeMemory: memory, Images: images}
	}
	for _, c := range []struct {
		name string
		all  []fleet.HostView
		want string
	}{
		{"most memory", []fleet.HostView{host("one", fleet.Up, 1), host("two", fleet.Up, 3), host("three", fleet.Up, 2)}, "two"},
		{"the image counts more", []fleet.HostView{host("one", fleet.Up, 1, "debian", "debian.golden"), host("two", fleet.Up, 3, "ubuntu")}, "one"},
		{"another image with that start", []fleet.HostView{host("one", fleet.Up, 1, "debian-old"), host("two", fleet.Up, 3)}, "two"},
		{"this host among equals", []fleet.HostView{host("a", fleet.Up, 3), host("own", fleet.Up, 3), host("z", fleet.Up, 3)}, "own"},
		{"only hosts that are up", []fleet.HostView{host("a", fleet.Silent, 9), host("b", fleet.Drained, 9), host("c", fleet.Removed, 9), host("d", fleet.Up, 0)}, "d"},
	} {
		if got, err := leastLoaded(c.all, "own", "debian"); err != nil || got != c.want {
			t.Errorf("%s: host = %q, %v, want %q", c.name, got, err, c.want)
		}
	}
	if _, err := leastLoaded([]fleet.HostView{host("a", fleet.Drained, 9)}, "own", "debian"); fail.CodeOf(err) != fail.Host {
		t.Errorf("without a host that is up = %v, want code HOST", err)
	}
}
