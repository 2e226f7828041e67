-- For .ci/book.py: tables of HTML as tables, each column as wide as what stands in it.
local function each_row(tbl, visit)
  for _, row in ipairs(tbl.head.rows) do visit(row) end
  for _, body in ipairs(tbl.bodies) do
    for _, row in ipairs(body.body) do visit(row) end
  end
end

function Table(tbl)
  local width, sum = {}, 0
  each_row(tbl, function(row)
    for i, cell in ipairs(row.cells) do
      local text = pandoc.utils.stringify(cell.contents)
      width[i] = math.max(width[i] or 6, math.min(#text, 40))
      for word in text:gmatch("%S+") do width[i] = math.max(width[i], #word + 4) end
    end
  end)
  for i in ipairs(tbl.colspecs) do sum = sum + (width[i] or 6) end
  for i, spec in ipairs(tbl.colspecs) do
    tbl.colspecs[i] = {spec[1], sum > 90 and (width[i] or 6) / sum or nil}
  end
  return tbl
end

function Str(word) -- at the start of a cell Typst takes it for a heading
  if word.text == "=" then return pandoc.RawInline("typst", "\\=") end
end

function RawBlock(block)
  if block.format ~= "html" then return end
  return pandoc.read(block.text, "html"):walk({Table = Table, Str = Str}).blocks
end
