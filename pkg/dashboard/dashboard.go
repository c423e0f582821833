// Package dashboard holds the pages that serve offers to a browser: the output of `make web`
// from the sources in web/.
//
// It owns the files and nothing about how they are served. They hold no data of the host; the
// pages ask the API for everything that they show.
package dashboard

import (
	"embed"
	"io/fs"
)

// pages has the built pages in dist, which is empty, except for .gitignore, in a fresh clone,
// so that the package always compiles.
//
//go:embed all:dist missing
var pages embed.FS

// Index is the name of the page that loads the other files.
const Index = "index.html"

// Files returns the pages, or one page that says that they were not built.
func Files() fs.FS {
	dir := "dist"
	if _, err := fs.Stat(pages, dir+"/"+Index); err != nil {
		dir = "missing"
	}
	files, err := fs.Sub(pages, dir)
	if err != nil {
		panic(err) // only for an invalid path
	}
	return files
}
