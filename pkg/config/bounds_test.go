package config_test

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// TestBoundsOfValues checks that the smallest and the largest value of each setting are
// accepted, and that values beyond them are not.
func TestBoundsOfValues(t *testing.T) {
	for _, c := range []struct {
		text string
		want string // part of the error, or "" for success
		ok   func(*config.Config) bool
	}{
		{"", "", func(c *config.Config) bool {
			return c.Pool == 0 && reflect.DeepEqual(c.Tasks, config.Tasks{Slots: 2, CleanupTTL: 360 * time.Hour})
		}},
		{"pool: 0", "", func(c *config.Config) bool { return c.Pool == 0 }},
		{"pool: 8", "", func(c *config.Config) bool { return c.Pool == 8 }},
		{"pool: 9", "0 to 8", nil},
		{"pool: -1", "0 to 8", nil},
		{"limits: {running: 1}", "", func(c *config.Config) bool { return c.Limits.Running == 1 }},
		{"limits: {running: -1}", "at least 1, got", nil},
		{"limits: {saved_home: 1MiB}", "", func(c *config.Config) bool { return c.Limits.SavedHome == 1<<20 }},
		{"tasks: {slots: 1}", "", func(c *config.Config) bool { return c.Tasks.Slots == 1 }},
		{"tasks: {slots: 7}", "", func(c *config.Config) bool { return c.Tasks.Slots == 7 }},
		{"tasks: {slots: -1}", "at least 1, got", nil},
		{"tasks: {cleanup_ttl: 1h}", "", func(c *config.Config) bool { return c.Tasks.CleanupTTL == time.Hour }},
		{"tasks: {cleanup_ttl: 59m}", "at least 1h", nil},
		{"audit: {retention: 1d}", "", func(c *config.Config) bool { return c.Audit.Retention == config.Duration(24*time.Hour) }},
		{"audit: {retention: 12d}", "", func(c *config.Config) bool { return c.Audit.Retention == config.Duration(12*24*time.Hour) }},
		{"audit: {retention: 10000d}", "", func(c *config.Config) bool { return c.Audit.Retention == config.Duration(10000*24*time.Hour) }},
		{"audit: {retention: 10001d}", "at most 10000d", nil},
		{"audit: {retention: 1ad}", "90s, 30m, 24h or 2d", nil},
		{"limits: {mirror_size: 1MiB, mirror_refs: 1, mirror_time: 1s}", "", func(c *config.Config) bool {
			return c.Limits.MirrorSize == 1<<20 && c.Limits.MirrorRefs == 1 && c.Limits.MirrorTime == time.Second
		}},
		{"limits: {mirror_refs: -1}", "at least 1", nil},
		{"limits: {mirror_time: 999ms}", "at least 1s", nil},
		{"limits: {mirror_size: big}", "512MiB or 8G", nil},
		{"log: {keep: 1, max_size: 64KiB}", "", func(c *config.Config) bool { return c.Log.Keep == 1 && c.Log.MaxSize == 64<<10 }},
		{"log: {keep: 1000}", "", func(c *config.Config) bool { return c.Log.Keep == 1000 }},
		{"log: {keep: 1001}", "1 to 1000", nil},
		{"log: {max_size: 65536}", "a size like 512MiB or 8G", nil},
		{"log: {max_size: 65535B}", "at least 64KiB", nil},
		{"attention: {desktop: loud}", "auto, on or off", nil},
		{"attention: {desktop: off, command: x}", "", func(c *config.Config) bool { return c.Attention.Desktop == "off" && c.Attention.Command == "x" }},
		{"network: {ports: [1, 65535]}", "", nil},
		{"network: {ports: [65536]}", "65536", nil},
		{"network: {ports: x}", "must be a list", nil},
		{"limits: x", "must be an object", nil},
		{"limits: {running: []}", "must be a number", nil},
	} {
		f := newFiles(t)
		f.user("config.yaml", c.text+"\n")
		got, err := config.Load(f.paths, f.ship)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("Load of %q: error %v, want nil", c.text, err)
		case c.want != "" && (fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), c.want)):
			t.Errorf("Load of %q: error %v, want a usage error with %q", c.text, err, c.want)
		case c.ok != nil && !c.ok(got):
			t.Errorf("Load of %q = pool %d, %+v, %+v, %+v, %+v, %+v, want the value of the file", c.text, got.Pool, got.Limits, got.Tasks, got.Audit, got.Log, got.Attention)
		}
	}
}

// TestSlotsOfTheEnvironment checks that an environment variable overrides a file.
func TestSlotsOfTheEnvironment(t *testing.T) {
	f := newFiles(t)
	f.user("config.yaml", "tasks: {slots: 7}\n")
	t.Setenv("AGENT_SESSIONIZER_TASKS_SLOTS", "3")
	if got := f.load().Tasks.Slots; got != 3 {
		t.Errorf("Tasks.Slots = %d, want 3", got)
	}
}

func TestParseRepoKey(t *testing.T) {
	for text, want := range map[string]config.RepoKey{
		"o/r": "github.com/o/r", "O/R": "github.com/o/r", "Git.Example.org/O/R": "git.example.org/O/R", "local:/a/b": "local:/a/b",
		"": "", "o": "", "/o/r": "", "o/": "", "o//r": "", "o/.": "", "o/..": "", "./r": "", "../r": "", "o /r": "", "me@o/r": "", `o\r/x`: "",
	} {
		if got, ok := config.ParseRepoKey(text); got != want || ok != (want != "") {
			t.Errorf("ParseRepoKey(%q) = %q, %t, want %q", text, got, ok, want)
		}
	}
	for _, text := range []string{"local:a", "local:/a/../b", "local:/a/"} {
		if got, ok := config.ParseRepoKey(text); ok {
			t.Errorf("ParseRepoKey(%q) = %q, want none", text, got)
		}
	}
}

// TestOriginsOfALongFile checks that every entry of a long file has its line, including an
// entry that comes from an alias.
func TestOriginsOfALongFile(t *testing.T) {
	f := newFiles(t)
	var b strings.Builder
	b.WriteString("profiles:\n  a: {network: &a {mode: open}}\n  b:\n    network:\n      <<: *a\nsecrets:\n")
	for i := range 150 {
		fmt.Fprintf(&b, "  S%03d: env:X\n", i)
	}
	f.user("config.yaml", b.String())
	got := listedValue(t, f, "github.com/o/r", "b")
	for _, want := range []string{
		"network.mode=open  user ~/config.yaml:2\n",
		"secrets.S000=env:X  user ~/config.yaml:7\n",
		"secrets.S149=env:X  user ~/config.yaml:156\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("listed values lack %q:\n%s", want, got)
		}
	}
}

func TestDirectoryWithoutHome(t *testing.T) {
	f := newFiles(t)
	f.user("config.yaml", "log: {file: ~/log}\n")
	t.Setenv("HOME", "")
	if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), "HOME is not set") {
		t.Errorf("Load without HOME: error %v, want a usage error with %q", err, "HOME is not set")
	}
}

// TestVariables checks that Variables lists every environment variable that is a setting,
// and that each has an effect.
func TestVariables(t *testing.T) {
	f := newFiles(t)
	f.user("config.yaml", "profiles: {other: {network: {mode: open}}}\n")
	log := filepath.Join(t.TempDir(), "log")
	values := map[string]struct {
		value string
		is    func(*config.Config) bool
	}{
		"AGENT_SESSIONIZER_IMAGE":                 {"mine", func(c *config.Config) bool { return c.Image == "mine" }},
		"AGENT_SESSIONIZER_PREPARE":               {"golden", func(c *config.Config) bool { return c.Prepare == config.PrepareGolden }},
		"AGENT_SESSIONIZER_POOL":                  {"3", func(c *config.Config) bool { return c.Pool == 3 }},
		"AGENT_SESSIONIZER_EDITOR":                {"zed", func(c *config.Config) bool { return c.Editor == "zed" }},
		"AGENT_SESSIONIZER_PROFILE":               {"other", func(c *config.Config) bool { return settings(t, c, "", "").Profile == "other" }},
		"AGENT_SESSIONIZER_LIMA_HOME":             {"/vms/", func(c *config.Config) bool { return c.Paths.LimaHome == "/vms" }},
		"AGENT_SESSIONIZER_LIMITS_RUNNING":        {"4", func(c *config.Config) bool { return c.Limits.Running == 4 }},
		"AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE": {"3MiB", func(c *config.Config) bool { return c.Limits.MemoryReserve == 3<<20 }},
		"AGENT_SESSIONIZER_LIMITS_DISK_RESERVE":   {"3MiB", func(c *config.Config) bool { return c.Limits.DiskReserve == 3<<20 }},
		"AGENT_SESSIONIZER_TASKS_SLOTS":           {"5", func(c *config.Config) bool { return c.Tasks.Slots == 5 }},
		"AGENT_SESSIONIZER_LOG_LEVEL":             {"error", func(c *config.Config) bool { return c.Log.Level == "error" }},
		"AGENT_SESSIONIZER_LOG_FORMAT":            {"json", func(c *config.Config) bool { return c.Log.Format == "json" }},
		"AGENT_SESSIONIZER_LOG_FILE":              {log, func(c *config.Config) bool { return string(c.Log.File) == log }},
		"AGENT_SESSIONIZER_LOG_FILE_ROTATION":     {"never", func(c *config.Config) bool { return c.Log.Rotation == "never" }},
		"LOG_LEVEL":                               {"debug", func(c *config.Config) bool { return c.Log.Level == "debug" }},
		"LOG_FORMAT":                              {"compact", func(c *config.Config) bool { return c.Log.Format == "compact" }},
		"LOG_FILE":                                {log, func(c *config.Config) bool { return string(c.Log.File) == log }},
		"LOG_FILE_ROTATION":                       {"hourly", func(c *config.Config) bool { return c.Log.Rotation == "hourly" }},
	}
	var names []string
	for _, v := range config.Variables() {
		names = append(names, v.Name)
		if v.Alias != "" {
			names = append(names, v.Alias)
		}
	}
	if len(names) != len(values) {
		t.Errorf("Variables() = %q (%d), want %d", names, len(names), len(values))
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			c, ok := values[name]
			if !ok {
				t.Fatalf("Variables() contains %s, want only variables of this test", name)
			}
			if c.is(f.load()) {
				t.Fatalf("the setting of %s has the value %q before it is set, want another", name, c.value)
			}
			t.Setenv(name, c.value)
			if !c.is(f.load()) {
				t.Errorf("Load with %s=%s ignores it, want its value", name, c.value)
			}
		})
	}
}

// TestStamp checks that the stamp changes with every file that is read, and with no other.
func TestStamp(t *testing.T) {
	f := newFiles(t)
	c := f.load()
	last := c.Stamp()
	for _, write := range []struct {
		where  func(name, text string)
		dir    string
		name   string
		counts bool
	}{
		{f.user, f.paths.Config, "config.yaml", true},
		{f.user, f.paths.Config, "resources.yaml", true},
		{f.user, f.paths.Config, "network-allowlist.txt", true},
		{f.user, f.paths.Config, "network-groups/mine.txt", true},
		{f.user, f.paths.Config, "network-groups/.mine.txt", false},
		{f.user, f.paths.Config, "network-groups/mine.md", false},
		{f.user, f.paths.Config, "other.yaml", false},
		{f.system, f.paths.System, "config.yaml", true},
		{f.system, f.paths.System, "network-groups/mine.txt", true},
	} {
		for _, text := range []string{"", "#"} { // creates the file, and then appends to it
			write.where(write.name, text)
			got := c.Stamp()
			if (got != last) != write.counts {
				t.Errorf("Stamp() after %s/%s gets %q changes: %t, want %t", write.dir, write.name, text, got != last, write.counts)
			}
			last = got
		}
		file := filepath.Join(write.dir, write.name)
		when := time.Unix(1_000_000_000, 7)
		if err := os.Chtimes(file, when, when); err != nil {
			t.Fatal(err)
		}
		if got := c.Stamp(); (got != last) != write.counts {
			t.Errorf("Stamp() after %s gets another time changes: %t, want %t", file, got != last, write.counts)
		}
		last = c.Stamp()
	}
}

// TestHintsOfTheSystemsFiles checks that an error in the system's file hints at sudoedit
// and states the line.
func TestHintsOfTheSystemsFiles(t *testing.T) {
	for text, want := range map[string]string{"image: [x\n": ":2:1: ", "pool: 99\n": ":1:7: ", "limits:\n  running: -1\n": ":2:12: "} {
		f := newFiles(t)
		f.system("config.yaml", text)
		file := filepath.Join(f.paths.System, "config.yaml")
		_, err := config.Load(f.paths, f.ship)
		if fail.CodeOf(err) != fail.Usage || fail.HintOf(err) != "sudoedit "+file || !strings.Contains(err.Error(), file+want) {
			t.Errorf("Load of the system's %q: error %v, hint %q, want a usage error with %q, hint %q", text, err, fail.HintOf(err), file+want, "sudoedit "+file)
		}
	}
	f := newFiles(t)
	delete(f.ship, "resources.yaml")
	if _, err := config.Load(f.paths, f.ship); err == nil || !strings.Contains(err.Error(), "read shipped resources.yaml") {
		t.Errorf("Load without the shipped resources.yaml: error %v, want %q in it", err, "read shipped resources.yaml")
	}
}

// TestForRefuses checks that For rejects a profile that does not exist, and resources that
// no VM can have.
func TestForRefuses(t *testing.T) {
	f := newFiles(t)
	if _, err := f.load().For("", "big"); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), `profile "big" does not exist, and no other profile is defined`) || fail.HintOf(err) != "agent-sessionizer config edit config.yaml" {
		t.Errorf("For without profiles: error %v, hint %q, want that no profile is defined, and a hint to edit config.yaml", err, fail.HintOf(err))
	}
	f.user("config.yaml", "profiles: {b: {}, a: {}}\nrepos: {o/r: {profile: a}}\nprofile: b\n")
	c := f.load()
	if _, err := c.For("", "big"); fail.CodeOf(err) != fail.Usage || !strings.HasSuffix(err.Error(), "defined profiles: a, b") || fail.HintOf(err) != "agent-sessionizer profile list" {
		t.Errorf("For of an unknown profile beside two: error %v, hint %q, want that a and b are defined, and a hint to show the settings", err, fail.HintOf(err))
	}
	for repo, want := range map[config.RepoKey]string{"github.com/o/r": "a", "github.com/o/other": "b"} {
		if got := settings(t, c, repo, "").Profile; got != want {
			t.Errorf("profile of %s = %q, want %q", repo, got, want)
		}
	}
	f.ship["resources.yaml"].Data = []byte("defaults: {memory: 1GiB, disk: 9GiB}\n")
	if _, err := f.load().For("github.com/o/r", ""); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), "cpus for github.com/o/r must be at least 1, got 0") {
		t.Errorf("For without processors: error %v, want a usage error with %q", err, "cpus for github.com/o/r must be at least 1, got 0")
	}
}

func TestOriginString(t *testing.T) {
	for want, o := range map[string]config.Origin{
		"f:3": {Layer: "user", File: "f", Line: 3, Name: "N"}, "f:1": {File: "f", Line: 1}, "f": {Layer: "user", File: "f"}, "N": {Layer: "environment", Name: "N"}, "default": {Layer: "default"},
	} {
		if got := o.String(); got != want {
			t.Errorf("%#v.String() = %q, want %q", o, got, want)
		}
	}
}

// TestOriginsOfLists checks that lists of names are shown by their length and file.
func TestOriginsOfLists(t *testing.T) {
	f := newFiles(t)
	f.user("network-allowlist.txt", "one.org\n")
	f.system("network-groups/more.txt", "a.org\nb.org\n")
	got := listedValue(t, f, "", "")
	for _, want := range []string{
		"network-allowlist.txt=1 name  user ~/network-allowlist.txt\n",
		"network-groups/git.txt=1 name  default (shipped) config/network-groups/git.txt\n",
		"network-groups/more.txt=2 names  system /etc/network-groups/more.txt\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("listed values lack %q:\n%s", want, got)
		}
	}
}

// TestSizesAndTimes checks the bounds and the formatting of sizes, durations, image
// references and files.
func TestSizesAndTimes(t *testing.T) {
	for text, want := range map[string]config.Size{
		"1B": 1, "1": 0, "1KiB": 1 << 10, "8G": 8 << 30, "8GB": 8 << 30, "1024TiB": 1 << 50, "1.5GiB": 3 << 29,
		"1125899906842625": 0, "1025TiB": 0, "0": 0, "-1": 0, "": 0, "x": 0,
	} {
		if got, err := config.ParseSize(text); got != want || (err == nil) != (want > 0) {
			t.Errorf("ParseSize(%q) = %d, %v, want %d", text, got, err, want)
		}
	}
	for size, want := range map[config.Size]string{
		1: "1B", 1023: "1023B", 1024: "1KiB", 1500: "1.465KiB", 1 << 20: "1MiB", 3 << 29: "1.5GiB", 1<<30 + 1: "1073741825B", 1<<30 + 1024: "1048577KiB", 1 << 50: "1024TiB", 5 << 40: "5TiB",
	} {
		if got, err := size.MarshalYAML(); err != nil || string(got) != want {
			t.Errorf("Size(%d).MarshalYAML() = %q, %v, want %q", int64(size), got, err, want)
		}
		var back config.Size
		if err := back.Set(want); err != nil || back != size {
			t.Errorf("Set(%q) makes %d, %v, want %d", want, int64(back), err, int64(size))
		}
	}
	kept := config.Size(5)
	if err := kept.Set("x"); err == nil || kept != 5 || kept.Type() != "size" {
		t.Errorf("Set(%q) of a Size of 5 makes %d, %v, type %q, want 5, an error, %q", "x", int64(kept), err, kept.Type(), "size")
	}
	for d, want := range map[time.Duration]string{0: "0s", time.Hour: "1h", 24 * time.Hour: "1d", 25 * time.Hour: "25h", 48 * time.Hour: "2d"} {
		if got, err := config.Duration(d).MarshalText(); err != nil || string(got) != want {
			t.Errorf("Duration(%v).MarshalText() = %q, %v, want %q", d, got, err, want)
		}
	}
	path := "/" + strings.Repeat("a", 1999)
	if r, err := config.ParseImageRef(path, ""); err != nil || r.Location != path || r.IsURL() {
		t.Errorf("ParseImageRef of a path of 2000 bytes: location of %d bytes, URL %t, %v, want the same path", len(r.Location), r.IsURL(), err)
	}
	for text, ok := range map[string]bool{strings.Repeat("a", 64): true, strings.Repeat("a", 65): false, "a\x7f": false, "~/\x1f": false} {
		if _, err := config.ParseImageRef(text, ""); (err == nil) != ok {
			t.Errorf("ParseImageRef(%q): error %v, want success: %t", text, err, ok)
		}
	}
	f := newFiles(t)
	f.user("config.yaml", strings.Repeat("#", 1<<20))
	f.load()
	f.user("config.yaml", strings.Repeat("#", 1<<20+1))
	if _, err := config.Load(f.paths, f.ship); err == nil || !strings.Contains(err.Error(), "larger than 1MiB") {
		t.Errorf("Load of a file over 1 MiB: error %v, want %q in it", err, "larger than 1MiB")
	}
}
