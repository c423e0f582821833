package repo

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

func TestParseRemotes(t *testing.T) {
	for in, want := range map[string]Ref{
		"Owner/Repo":                       {Key: "github.com/owner/repo", Slug: "Owner/Repo", URL: "https://github.com/Owner/Repo.git"},
		"owner/repo.git":                   {Key: "github.com/owner/repo", Slug: "owner/repo", URL: "https://github.com/owner/repo.git"},
		"owner/.github":                    {Key: "github.com/owner/.github", Slug: "owner/.github", URL: "https://github.com/owner/.github.git"},
		"owner/repo@fix/a-1":               {Key: "github.com/owner/repo", Slug: "owner/repo", URL: "https://github.com/owner/repo.git", Branch: "fix/a-1"},
		"github.com/owner/repo":            {Key: "github.com/owner/repo", Slug: "owner/repo", URL: "https://github.com/owner/repo"},
		"https://GitHub.com/owner/repo/":   {Key: "github.com/owner/repo", Slug: "owner/repo", URL: "https://github.com/owner/repo"},
		"https://git.example:443/a/b.git":  {Key: "git.example/a/b", Slug: "a/b", URL: "https://git.example/a/b.git"},
		"https://git.example:8443/a/B.git": {Key: "git.example:8443/a/B", Slug: "a/B", URL: "https://git.example:8443/a/B.git"},
		"git@github.com:owner/repo.git":    {Key: "github.com/owner/repo", Slug: "owner/repo", URL: "git@github.com:owner/repo.git"},
		"ssh://git@h.example:2222/x/y/z":   {Key: "h.example:2222/x/y/z", Slug: "x/y/z", URL: "ssh://git@h.example:2222/x/y/z"},
		"ssh://h.example/~me/y":            {Key: "h.example/~me/y", Slug: "~me/y", URL: "ssh://h.example/~me/y"},
		"git://127.0.0.1:9999/r":           {Key: "127.0.0.1:9999/r", Slug: "r", URL: "git://127.0.0.1:9999/r"},
		"file:///srv/git/thing.git":        {Key: "local:/srv/git/thing.git", Slug: "thing", URL: "file:///srv/git/thing.git"},
	} {
		t.Run(in, func(t *testing.T) {
			got, err := Parse(in, "/nowhere")
			if err != nil {
				t.Fatal(err)
			}
			equal(t, "ref", got, want)
		})
	}
}

func TestParseRefusesTricks(t *testing.T) {
	for _, in := range []string{
		"", "-", "--upload-pack=x", "-o/x", "owner", "owner/", "/", "/nowhere/at/all", "a/b/c", "owner/repo/tree/main",
		"ext::sh -c id", "ext::id", "fd::17", "transport::https://h/a", "owner/repo::x",
		"..", "../x", "./../x", "owner/..", "../../etc", "owner/a..b", "https://h.example/a/../b", "https://h.example/a/..",
		"owner/repo;id", "owner/$(id)", "owner/`id`", "owner/repo|x", "owner/repo&", "owner/re po", "owner/re'po", `owner/re"po`,
		"owner/repo\n", "owner/repo\x00", "owner/\x1b[31m", "owner/re\u200bpo", "owner/\u202erepo", "оwner/repo", "owner/rеpo",
		"owner/repo\xff", "owner/.git", "owner/.GIT", "owner/.", strings.Repeat("a", 40) + "/r", "o/" + strings.Repeat("a", 101), "o/" + strings.Repeat("a", 5000),
		"owner/repo@", "owner/repo@-x", "owner/repo@a..b", "owner/repo@a b", "owner/repo@a;id", "owner/repo@$(id)", "owner/repo@refs/heads/x",
		"owner/repo@HEAD", "owner/repo.", "owner/repo.git.git", "https://h.example/a./b", "owner/repo@a.lock", "owner/repo@a@{1}", "owner/repo@/a", "owner/repo@a/",
		"https://user:pw@h.example/a/b", "https://token@h.example/a/b", "ssh://git:pw@h.example/a/b", "user:pw@h.example/a/b",
		"http://h.example/a/b", "ftp://h.example/a/b", "javascript://h/a", "file://host/a/b", "file:///", "file:///a/../b", "file:///a;b", "file:///a/-b",
		"https://-oProxyCommand=id/a/b", "ssh://-oProxyCommand=id/a", "git@-oProxyCommand=id:a/b", "-oProxyCommand=id:a/b",
		"git@h.example:-a/b", "git@h.example:a/-b", "git@h.example:", "git@h.example:a/../b", "host:path",
		"https://h.example/a%2f..%2fb", "https://h.example/a/b?x=1", "https://h.example/a/b#main", "https://h.example", "https://h.example/",
		"https:///a/b", "https://h.example:99999999/a/b", "https://h.example:x/a/b", "https://h.example:/a/b", "https://ⅇxample.com/a/b",
		"https://h.example/a.git/b", "https://h.example/a//b", "https://h.example/.git", "https://github.com/owner", "https://github.com/o/r/tree/main",
		"https://h.example/1/2/3/4/5/6/7/8/9", "https://h..example/a/b", "git@github.com:a/b/c",
	} {
		t.Run(in, func(t *testing.T) {
			ref, err := Parse(in, "/nowhere")
			if err == nil {
				t.Fatalf("Parse(%q) = %+v, nil, want an error", in, ref)
			}
			if code := fail.CodeOf(err); code != fail.Usage && code != fail.NotFound && code != fail.Secret {
				t.Errorf("Parse(%q) = %v (code %v), want a usage, not-found or secret error", in, err, code)
			}
			if fail.HintOf(err) == "" {
				t.Errorf("Parse(%q) = %v, want a hint", in, err)
			}
			if strings.Contains(err.Error(), "pw") || strings.Contains(err.Error(), "token@") {
				t.Errorf("Parse(%q) = %v, want no credential in the error", in, err)
			}
			if strings.ContainsAny(err.Error(), "\x1b\n\x00") {
				t.Errorf("Parse(%q) = %q, want no control bytes in the error", in, err.Error())
			}
		})
	}
}

func TestParseLocal(t *testing.T) {
	isolate(t)
	dir := filepath.Join(t.TempDir(), "my project")
	host(t, "/", `git init -q '`+dir+`' && mkdir '`+dir+`/sub'`)
	for in, cwd := range map[string]string{dir: "/", ".": dir, "./sub": dir, "./my project": filepath.Dir(dir)} {
		ref, err := Parse(in, cwd)
		if err != nil {
			t.Fatal(err)
		}
		equal(t, in, ref, Ref{Key: "local:" + dir, Slug: "my project", Path: dir})
	}
	for url, want := range map[string]string{
		"git@github.com:Own/Rep.git":               "github.com/own/rep",
		"https://x-access-token:s3cret@h.test/a/b": "h.test/a/b",
		"https://github.com/own/rep":               "github.com/own/rep",
		"/srv/other.git":                           "local:" + dir,
		"file:///srv/other.git":                    "local:" + dir,
		"ext::sh -c id":                            "local:" + dir,
	} {
		host(t, dir, `git config remote.origin.url '`+url+`'`)
		host(t, dir, `git config remote.origin.fetch '+refs/heads/*:refs/remotes/origin/*'`)
		ref, err := Parse(".", dir)
		if err != nil {
			t.Fatal(err)
		}
		equal(t, url, ref.Key, want)
		if strings.Contains(ref.URL, "s3cret") {
			t.Errorf("URL of the local clone = %s, want no credentials", ref.URL)
		}
	}
	if _, err := Parse("./.git", dir); fail.CodeOf(err) != fail.Usage {
		t.Errorf("Parse(./.git) = %v, want code %v", err, fail.Usage)
	}
	if _, err := Parse(".", t.TempDir()); fail.CodeOf(err) != fail.NotFound || fail.HintOf(err) == "" {
		t.Errorf("Parse(.) without a repository = %v (hint %q), want code %v with a hint", err, fail.HintOf(err), fail.NotFound)
	}
}

// git accepts every reference name that we accept.
func TestRefNamesAgreeWithGit(t *testing.T) {
	for _, name := range []string{
		"main", "a/b", "ümlaut", "a.b", "a-b", "x@y", "@", "a#1", "fix(x)", "a,b", "日本", ".a", "a/.b", "a..b", "a.lock", "a.lock/b", "a b",
		"a~", "a^", "a:", "a?", "a*", "a[", `a\`, "a//b", "/a", "a/", "a.", "a@{", "-a", "a\x7f", "a\n", "", "{", "HEAD",
	} {
		gitSays := exec.CommandContext(t.Context(), "git", "check-ref-format", "refs/heads/"+name).Run() == nil
		if validRefName(name) && !gitSays {
			t.Errorf("validRefName(%q) = true, want false as git", name)
		}
		if !validRefName(name) && gitSays && !strings.HasPrefix(name, "-") {
			t.Errorf("validRefName(%q) = false, want true as git", name)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"owner/repo@x", "https://h.example:1/a/b.git", "git@h.example:a/b", "ssh://git@h/a", "file:///a/b", "ext::x", "a/../b"} {
		f.Add(s)
	}
	m := Mirrors{Dir: "/mirrors"}
	f.Fuzz(func(t *testing.T, s string) {
		if isLocal(s) {
			return // calls git
		}
		ref, err := Parse(s, "/nowhere")
		if err != nil {
			if fail.HintOf(err) == "" {
				t.Errorf("Parse(%q) = %v, want a hint", s, err)
			}
			return
		}
		if strings.HasPrefix(ref.URL, "-") || strings.Contains(ref.URL, "::") || strings.ContainsAny(ref.URL, " $`;|&<>\"'\\\n\x00") {
			t.Errorf("URL of Parse(%q) = %q, want no option, no ::, no shell characters", s, ref.URL)
		}
		dir, err := m.mirrorDir(ref)
		if err != nil || !strings.HasPrefix(dir, "/mirrors/") || filepath.Clean(dir) != dir || strings.Contains(strings.TrimSuffix(dir, ".git"), ".git/") {
			t.Errorf("mirrorDir of %q = %q, %v, want a clean path below /mirrors", s, dir, err)
		}
		again, err := Parse(ref.URL, "/nowhere")
		if err != nil || again.Key != ref.Key {
			t.Errorf("Parse(%q), the URL of %q, = key %q, %v, want %q", ref.URL, s, again.Key, err, ref.Key)
		}
	})
}
