package config_test

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

func TestPaths(t *testing.T) {
	t.Setenv("HOME", "/h")
	for _, c := range []struct{ name, env, want string }{
		{"unset", "", "/h/.config/agent-sessionizer"},
		{"absolute", "/x/../y", "/y/agent-sessionizer"},
		{"relative is ignored", "conf", "/h/.config/agent-sessionizer"},
		{"a tilde is relative", "~/conf", "/h/.config/agent-sessionizer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("XDG_CONFIG_HOME", c.env)
			p, err := config.DefaultPaths()
			if err != nil || p.Config != c.want {
				t.Errorf("DefaultPaths() with XDG_CONFIG_HOME=%q: Config %q, %v, want %q", c.env, p.Config, err, c.want)
			}
		})
	}
	t.Setenv("XDG_STATE_HOME", "/s")
	t.Setenv("XDG_DATA_HOME", "")
	t.Setenv("XDG_CACHE_HOME", "rel")
	p, err := config.DefaultPaths()
	if err != nil {
		t.Fatal(err)
	}
	for got, want := range map[string]string{
		p.State: "/s/agent-sessionizer", p.Data: "/h/.local/share/agent-sessionizer", p.Cache: "/h/.cache/agent-sessionizer",
		p.LimaHome: "/h/.agent-vms", p.System: "/etc/agent-sessionizer",
		p.Store(): "/s/agent-sessionizer/store.db", p.SessionLock("i"): "/s/agent-sessionizer/locks/session-i", p.SessionDir("i"): "/s/agent-sessionizer/sessions/i",
		p.Images(): "/h/.local/share/agent-sessionizer/images", p.Mirrors(): "/h/.cache/agent-sessionizer/mirrors",
	} {
		if got != want {
			t.Errorf("path = %q, want %q", got, want)
		}
	}
	for _, home := range []string{"", "relative"} {
		t.Setenv("HOME", home)
		if _, err := config.DefaultPaths(); fail.CodeOf(err) != fail.Host || fail.HintOf(err) == "" {
			t.Errorf("DefaultPaths() with HOME=%q: error %v, hint %q, want code %v and a hint", home, err, fail.HintOf(err), fail.Host)
		}
	}
}

func TestLimaHome(t *testing.T) {
	f := newFiles(t)
	if got := f.load().Paths.LimaHome; got != f.paths.LimaHome {
		t.Errorf("LimaHome by default = %q, want %q", got, f.paths.LimaHome)
	}
	f.user("config.yaml", "lima_home: /short//vms/\n")
	if got := f.load().Paths.LimaHome; got != "/short/vms" {
		t.Errorf("LimaHome of config.yaml = %q, want %q", got, "/short/vms")
	}
	t.Setenv("AGENT_SESSIONIZER_LIMA_HOME", "/env")
	if got := f.load().Paths.LimaHome; got != "/env" {
		t.Errorf("LimaHome of the environment = %q, want %q", got, "/env")
	}
}

func TestMakePaths(t *testing.T) {
	dir := t.TempDir()
	p := config.Paths{State: dir + "/a/s", Data: dir + "/a/d", Cache: dir + "/a/c", LimaHome: dir + "/a/l"}
	for range 2 {
		if err := p.Make(); err != nil {
			t.Fatal(err)
		}
	}
	fi, err := os.Stat(p.State)
	if err != nil {
		t.Error(err)
	} else if got := fi.Mode().Perm(); got != 0o700 {
		t.Errorf("mode of %s = %v, want %v", p.State, got, os.FileMode(0o700))
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p.Cache = filepath.Join(file, "c")
	if err := p.Make(); fail.CodeOf(err) != fail.Host {
		t.Errorf("Make() below a file: error %v, want code %v", err, fail.Host)
	}
}

func TestSize(t *testing.T) {
	for text, want := range map[string]config.Size{
		"8GiB": 8 << 30, "8G": 8 << 30, "8gb": 8 << 30, "512MiB": 512 << 20, "1.5GiB": 3 << 29,
		"1TiB": 1 << 40, "100B": 100, "1024TiB": 1 << 50,
	} {
		got, err := config.ParseSize(text)
		if err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v, want %d", text, int64(got), err, int64(want))
		}
	}
	for _, text := range []string{"", "0", "0B", "100", "8 GiB", "-1", "GiB", "8XB", "8GiB8", "1025TiB", "1e300", "Inf", "NaN", "0x10", "99999999999999999999"} {
		if got, err := config.ParseSize(text); err == nil {
			t.Errorf("ParseSize(%q) = %d, want an error", text, int64(got))
		}
	}
	for size, want := range map[config.Size]string{8 << 30: "8GiB", 3 << 29: "1.5GiB", 512 << 20: "512MiB", 1025 << 20: "1.001GiB", 0: "0B", 123456789: "117.7MiB"} {
		if got := size.String(); got != want {
			t.Errorf("Size(%d).String() = %q, want %q", int64(size), got, want)
		}
	}
	// A size written as YAML is read back unchanged, to the byte.
	sizes := []config.Size{1, 1023, 1024, 1025 << 20, 1536 << 20, 123456789, 8 << 30, 1 << 50, 1<<50 - 1}
	for range 200 {
		sizes = append(sizes, config.Size(rand.Int64N(1<<50))+1, config.Size(rand.Int64N(1<<20)+1)<<20)
	}
	for _, size := range sizes {
		text, err := yaml.Marshal(struct{ S config.Size }{size})
		var back config.Size
		if err == nil {
			back, err = config.ParseSize(strings.TrimSpace(strings.TrimPrefix(string(text), "s:")))
		}
		if err != nil || back != size {
			t.Errorf("Size %d as YAML, %q, is read as %d, %v, want the same", int64(size), text, int64(back), err)
		}
	}
	// As a flag, an invalid value leaves the old value in place.
	var flag config.Size = 7
	if err := flag.Set("bad"); err == nil || flag != 7 || flag.Type() != "size" {
		t.Errorf("Set(%q) of a Size of 7 makes %d, %v, type %q, want 7, an error, %q", "bad", int64(flag), err, flag.Type(), "size")
	}
	if err := flag.Set("2GiB"); err != nil || flag != 2<<30 {
		t.Errorf("Set(%q) makes %d, %v, want %d", "2GiB", int64(flag), err, int64(2<<30))
	}
}
