package session

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
)

// The process that takes a standby VM may die between any two of its renames.
func TestAdoptGoesOn(t *testing.T) {
	parts := []string{"gateway/policy.json", "ssh_key", "ssh_key.pub"}
	for moved := range len(parts) + 1 {
		w := newWorker(t, driver{})
		s := put(t, w.Sessions, "0a1b2c3d4e5f", "one", Creating, Ready, Status{})
		dir := w.Sessions.Config.Paths.SessionDir(s.ID)
		write := func(path, text string) {
			t.Helper()
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		// What an earlier VM of the session had, and what came with this one.
		write(filepath.Join(dir, "gateway/old"), "")
		write(filepath.Join(dir, "ssh_key"), "old")
		write(filepath.Join(dir, "standby/standby.json"), `{"vm": "standby-123456", "image": "/x"}`)
		for i, part := range parts {
			if i < moved {
				if i == 0 {
					if err := os.RemoveAll(filepath.Join(dir, "gateway")); err != nil {
						t.Fatal(err)
					}
				}
				write(filepath.Join(dir, part), "new "+part)
			} else {
				write(filepath.Join(dir, "standby", part), "new "+part)
			}
		}
		standby, err := golden.ReadStandby(w.Sessions.Config.Paths.Standby(s.ID))
		if err != nil {
			t.Fatal(err)
		}
		if err := w.standbys().adoptStandby(t.Context(), &s, standby); err != nil {
			t.Fatalf("adoptStandby with %d files moved = %v, want nil", moved, err)
		}
		if s.VM() != "standby-123456" || s.Status.From != golden.FromPool {
			t.Errorf("%d files moved: VM = %q, status %+v, want standby-123456 from %s", moved, s.VM(), s.Status, golden.FromPool)
		}
		for _, part := range parts {
			if text, err := os.ReadFile(filepath.Join(dir, part)); err != nil || string(text) != "new "+part {
				t.Errorf("%d files moved: %s = %q, %v, want \"new %s\"", moved, part, text, err, part)
			}
		}
		for _, gone := range []string{"standby", "gateway/old"} {
			if _, err := os.Stat(filepath.Join(dir, gone)); err == nil {
				t.Errorf("%d files moved: %s exists, want it removed", moved, gone)
			}
		}
	}
}

// We own the pool's directory, but a standby VM's name goes into paths and must not
// be that of another VM.
func TestStandbyHasTheNameOfOne(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"", "agent-project", "standby-../x", "standby-A"} {
		if err := os.WriteFile(filepath.Join(dir, "standby.json"), []byte(`{"vm": "`+name+`"}`), 0o600); err != nil {
			t.Fatal(err)
		}
		if s, err := golden.ReadStandby(dir); err == nil || !strings.Contains(err.Error(), "not the name") {
			t.Errorf("ReadStandby(%q) = %+v, %v, want \"not the name\"", name, s, err)
		}
	}
}

func TestOnBattery(t *testing.T) {
	for what, c := range map[string]struct {
		supplies map[string]string // name: type and online
		want     bool
	}{
		"a server":         {map[string]string{}, false},
		"plugged in":       {map[string]string{"AC": "Mains 1"}, false},
		"on its battery":   {map[string]string{"AC": "Mains 0", "ucsi": "USB 0"}, true},
		"one of two plugs": {map[string]string{"AC": "Mains 0", "AC2": "Mains 1"}, false},
		"a mouse":          {map[string]string{"hid": "Battery 0"}, false},
	} {
		dir := t.TempDir()
		for name, text := range c.supplies {
			kind, online, _ := strings.Cut(text, " ")
			if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
				t.Fatal(err)
			}
			for file, text := range map[string]string{"type": kind, "online": online} {
				if err := os.WriteFile(filepath.Join(dir, name, file), []byte(text+"\n"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
		if got := batteryOf(dir); got != c.want {
			t.Errorf("batteryOf with %s = %v, want %v", what, got, c.want)
		}
	}
}

func TestOnBatteryOfAMac(t *testing.T) {
	for out, want := range map[string]bool{
		"":                              false,
		"Now drawing from 'AC Power'\n": false,
		"Now drawing from 'AC Power'\n -InternalBattery-0 (id=4522083)\t80%; charging; 1:10\n":   false,
		"Now drawing from 'Battery Power'\n -InternalBattery-0 (id=4522083)\t79%; discharging\n": true,
		"Now drawing from 'AC Power'\n -a UPS called 'Battery Power' (id=1)\t100%; charged\n":    false,
	} {
		if got := drawsFromBattery(out); got != want {
			t.Errorf("drawsFromBattery(%q) = %t, want %t", out, got, want)
		}
	}
}
