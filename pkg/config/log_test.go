package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/logfile"
)

// loadLog loads minimal shipped settings and the user's text.
func loadLog(t *testing.T, user string) (*Config, error) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(user), 0o600); err != nil {
		t.Fatal(err)
	}
	return Load(Paths{System: filepath.Join(dir, "etc"), Config: dir, State: "/state", LimaHome: dir}, fstest.MapFS{
		"config.yaml":           {Data: []byte("limits: {running: 1, memory_reserve: 1GiB, disk_reserve: 1GiB}\nnetwork: {mode: open}\n")},
		"resources.yaml":        {Data: []byte("defaults: {cpus: 1, memory: 1GiB, disk: 9GiB}\n")},
		"network-allowlist.txt": {},
		"prices.yaml":           {},
	})
}

func TestLogSettings(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	unset := Log{Level: "auto", Format: "pretty", Rotation: logfile.Daily, MaxSize: 16 << 20, Keep: 7}
	said := "log: {level: debug, format: compact, file: ~/a.log, rotation: hourly, max_size: 1MiB, keep: 3}\naudit: {retention: 2d}\n"
	file := Log{Level: "debug", Format: "compact", File: Dir(filepath.Join(home, "a.log")), Rotation: logfile.Hourly, MaxSize: 1 << 20, Keep: 3}
	with := func(l Log, change func(*Log)) Log { change(&l); return l }
	for _, c := range []struct {
		name, user string
		env        []string
		want       Log
	}{
		{"nothing", "", nil, unset},
		{"a file", said, nil, file},
		{"bare names", said, []string{"LOG_LEVEL=ERROR", "LOG_FORMAT=json", "LOG_FILE=/b.log", "LOG_FILE_ROTATION=never"}, with(file, func(l *Log) {
			l.Level, l.Format, l.File, l.Rotation = "error", "json", "/b.log", logfile.Never
		})},
		{"our names", said, []string{
			"LOG_LEVEL=error", "LOG_FORMAT=json", "LOG_FILE=relative", "LOG_FILE_ROTATION=bad", "AGENT_SESSIONIZER_LOG_LEVEL=Trace",
			"AGENT_SESSIONIZER_LOG_FORMAT=PRETTY", "AGENT_SESSIONIZER_LOG_FILE=~/c/../d.log", "AGENT_SESSIONIZER_LOG_FILE_ROTATION=daily",
		}, with(file, func(l *Log) {
			l.Level, l.Format, l.File, l.Rotation = "trace", "pretty", Dir(filepath.Join(home, "d.log")), logfile.Daily
		})},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, e := range c.env {
				name, value, _ := strings.Cut(e, "=")
				t.Setenv(name, value)
			}
			got, err := loadLog(t, c.user)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got.Log); diff != "" {
				t.Errorf("Log mismatch (-want +got):\n%s", diff)
			}
			if want := map[bool]string{true: "90d", false: "2d"}[c.user == ""]; got.Audit.Retention.String() != want {
				t.Errorf("Audit.Retention = %v, want %s", got.Audit.Retention, want)
			}
		})
	}
}

// TestBadLogSettings checks that each invalid value is a usage error that names its source,
// with a hint that fixes it.
func TestBadLogSettings(t *testing.T) {
	for env, hint := range map[string]string{
		"AGENT_SESSIONIZER_LOG_LEVEL=5":            "unset AGENT_SESSIONIZER_LOG_LEVEL",
		"AGENT_SESSIONIZER_LOG_FORMAT= json":       "unset AGENT_SESSIONIZER_LOG_FORMAT",
		"AGENT_SESSIONIZER_LOG_FILE=~other/x":      "unset AGENT_SESSIONIZER_LOG_FILE",
		"AGENT_SESSIONIZER_LOG_FILE_ROTATION=1d":   "unset AGENT_SESSIONIZER_LOG_FILE_ROTATION",
		"AGENT_SESSIONIZER_LOG_LEVEL=info\nerror ": "unset AGENT_SESSIONIZER_LOG_LEVEL",
	} {
		t.Run(env, func(t *testing.T) {
			name, value, _ := strings.Cut(env, "=")
			t.Setenv(name, value)
			_, err := loadLog(t, "")
			if fail.CodeOf(err) != fail.Usage || fail.HintOf(err) != hint || !strings.HasPrefix(err.Error(), name+": ") {
				t.Errorf("Load with %q: error %v, hint %q, want a usage error that begins with %q, hint %q", env, err, fail.HintOf(err), name+": ", hint)
			}
		})
	}
	for _, user := range []string{
		"log: {level: loud}", "log: {format: xml}", "log: {file: here}", "log: {rotation: weekly}", "log: {max_size: 1KiB}", "log: {max_size: big}",
		"log: {keep: -1}", "log: {keep: 100000}", "log: {colour: red}", "audit: {retention: 1h}", "audit: {retention: long}", "audit: {retention: -24h}",
	} {
		_, err := loadLog(t, "image: x\n"+user+"\n")
		if fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), "config.yaml:2:") || fail.HintOf(err) != "agent-sessionizer config edit config.yaml" {
			t.Errorf("Load of %q: error %v, hint %q, want a usage error at config.yaml:2 with a hint to edit it", user, err, fail.HintOf(err))
		}
	}
}

// TestVariablesOfOthers checks that values of unprefixed variables that are meant for other
// programs are ignored.
func TestVariablesOfOthers(t *testing.T) {
	for name, value := range map[string]string{"LOG_LEVEL": "verbose", "LOG_FORMAT": "xml", "LOG_FILE": "log/here", "LOG_FILE_ROTATION": "weekly"} {
		t.Setenv(name, value)
	}
	got, err := loadLog(t, "log: {level: debug}")
	if err != nil {
		t.Fatal(err)
	}
	if got.Log.Level != "debug" || got.Log.Format != "pretty" || got.Log.File != "" || got.Log.Rotation != logfile.Daily {
		t.Errorf("Log = %+v, want level debug, format pretty, no file, rotation %v", got.Log, logfile.Daily)
	}
}
