// Package release knows what was released: the licences of everything in the binary, which it
// embeds, and the newest version, which it asks a release feed for.
//
// It contacts the feed only when Latest is called, and never downloads or replaces a program.
package release

import (
	"bytes"
	"compress/gzip"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"golang.org/x/mod/semver"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// Feed is where the newest release of the project is published.
const Feed = "https://api.github.com/repos/agent-sessionizer/agent-sessionizer/releases/latest"

const (
	feedTimeout = 15 * time.Second
	maxFeed     = 1 << 20 // bytes of an answer
)

//go:generate go test -run ^TestNoticesAreCurrent$ . -update

//go:embed notices.txt.gz
var notices []byte

// Notices returns the licence of the program and those of all modules and packages in it. The
// text is kept compressed, and costs nothing until it is printed.
func Notices() (string, error) {
	r, err := gzip.NewReader(bytes.NewReader(notices))
	if err != nil {
		return "", fmt.Errorf("read licences: %w", err)
	}
	text, err := io.ReadAll(r)
	if err != nil {
		return "", fmt.Errorf("read licences: %w", err)
	}
	return string(text), nil
}

// Latest requests the newest version once, from a feed that answers like Feed.
func Latest(ctx context.Context, client *http.Client, feed string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, feedTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, feed, nil)
	if err != nil {
		return "", fmt.Errorf("request latest release: %w", err)
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "agent-sessionizer")
	resp, err := client.Do(req)
	if err != nil {
		return "", fmt.Errorf("request latest release: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("request latest release: %s answered %d", req.URL.Redacted(), resp.StatusCode)
	}
	var answer struct {
		TagName string `json:"tag_name"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxFeed)).Decode(&answer); err != nil {
		return "", fmt.Errorf("read latest release: %w", err)
	}
	if tag := answer.TagName; len(tag) > 100 || !semver.IsValid(tag) {
		return "", fmt.Errorf("read latest release: tag_name must be a version such as v1.2.3, got %.100q", tag)
	}
	return answer.TagName, nil
}

// afterTag is what git describe adds to a tag if the source is not exactly that of the tag.
var afterTag = lazyregexp.New(`^(.*?)(-[0-9]+-g[0-9a-f]+)?(-dirty)?$`)

// Compare returns -1 if a build is older than a release, 1 if it is newer, and 0 if it is that
// release. A build of source that was changed after a release is newer than that release. Known is
// false if the version of the build is neither that of a release nor based on one.
func Compare(build, release string) (order int, known bool) {
	parts := afterTag.FindStringSubmatch(build)
	tag := "v" + strings.TrimPrefix(parts[1], "v")
	if !semver.IsValid(tag) {
		return 0, false
	}
	order = semver.Compare(tag, release)
	if changed := parts[2] != "" || parts[3] != ""; order == 0 && changed {
		order = 1
	}
	return order, true
}
